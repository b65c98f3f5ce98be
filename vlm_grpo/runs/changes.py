"""Tables of metrics before and after training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlm_grpo.common.tables import aligned


def before_after_table(before: Mapping[str, float], after: Mapping[str, float], headline: str) -> str:
    """Metrics of the same split before and after training, the headline first.

    >>> print(before_after_table({"reward": 0.25, "accuracy": 0.5}, {"reward": 0.5, "accuracy": 0.45}, "accuracy"))
    metric    before   after   change
    accuracy  0.5000  0.4500  -0.0500
    reward    0.2500  0.5000  +0.2500
    """
    return aligned([("metric", "before", "after", "change"), *_changes(before, after, headline)])


@dataclass(frozen=True)
class Change:
    """Metrics of one task before and after training; `title` says of what, `headline` is the first of them."""

    title: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    headline: str


def grouped_table(changes: Sequence[Change]) -> str:
    """As `before_after_table`, with a group of rows for each of several tasks.

    >>> boxes = Change("boxes, 8 samples", {"accuracy": 0.5}, {"accuracy": 0.75}, "accuracy")
    >>> print(grouped_table([boxes, Change("sums", {"exact": 0.25}, {"exact": 0.25}, "exact")]))
    metric            before   after   change
    boxes, 8 samples
      accuracy        0.5000  0.7500  +0.2500
    sums
      exact           0.2500  0.2500  +0.0000
    """
    rows = [("metric", "before", "after", "change")]
    for change in changes:
        rows.append((change.title, "", "", ""))
        rows += [(f"  {name}", *cells) for name, *cells in _changes(change.before, change.after, change.headline)]
    return aligned(rows)


def _changes(before: Mapping[str, float], after: Mapping[str, float], headline: str) -> list[tuple[str, ...]]:
    rows = []
    for name in sorted({*before, *after}, key=lambda name: (name != headline, name)):
        missing = 0.0 if name.startswith("num_") else math.nan  # what was not counted did not occur
        old, new = before.get(name, missing), after.get(name, missing)
        rows.append((name, f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}"))
    return rows


def table(metrics: Mapping[str, float]) -> str:
    """One metric a line.

    >>> print(table({"reward": 0.25, "accuracy": 0.5}))
    reward    0.2500
    accuracy  0.5000
    """
    return aligned([(name, f"{value:.4f}") for name, value in metrics.items()], "<")
