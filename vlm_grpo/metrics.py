"""What a run leaves for its reader: metrics, rollouts, a progress line and a before/after table. Rank 0 only.

output_dir/metrics.jsonl                  one JSON object per line: "step" and the metrics of that moment
output_dir/tensorboard/                   the same for TensorBoard
output_dir/rollouts/step-NNNNNN.parquet   one row per answer of the step
"""

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vlm_grpo.errors import UserError
from vlm_grpo.stats import RolloutRow
from vlm_grpo.tables import aligned


class MetricsWriter:
    """Appends metrics to metrics.jsonl and TensorBoard. Use as a context manager, or call `close`."""

    def __init__(self, output_dir: Path, resumed_step: int | None = None):
        """`resumed_step`: TensorBoard forgets what a killed run wrote after that step."""
        self._path = output_dir / "metrics.jsonl"
        purge_step = None if resumed_step is None else resumed_step + 1
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a row is in the file at once, and one that the disk refused is not tried again on closing
            self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the writer is
            self._tensorboard = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)
        except OSError as error:
            raise UserError(f"cannot write in {output_dir}: {error.strerror or error} (output_dir)") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; JSON has no NaN or infinity, so these become null."""
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        try:
            line = (json.dumps({"step": step, **row}) + "\n").encode()
            if self._lines.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, step)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error} (output_dir)") from error

    def close(self) -> None:
        self._lines.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_rollouts(output_dir: Path, step: int, rows: Sequence[RolloutRow]) -> Path:
    """Write the step's rollouts, whole or not at all; each reward part is a column `rewards/{part}`."""
    folder = output_dir / "rollouts"
    path = folder / f"step-{step:06}.parquet"
    aside = folder / f".{path.name}.writing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(_rollout_table(step, rows), aside)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error} (output_dir)") from error
    return path


def _rollout_table(step: int, rows: Sequence[RolloutRow]) -> pa.Table:
    texts = ("task", "sample_id", "prompt", "thought", "answer", "model_answer")
    numbers = ("reward", "thought_advantage", "answer_advantage")
    columns = {"step": pa.array([step] * len(rows), pa.int64())}
    columns |= {name: pa.array([_utf8(getattr(row, name)) for row in rows], pa.string()) for name in texts}
    columns |= {name: pa.array([getattr(row, name) for row in rows], pa.float64()) for name in numbers}
    for part in sorted({part for row in rows for part in row.parts}):
        columns[f"rewards/{part}"] = pa.array([row.parts.get(part) for row in rows], pa.float64())
    return pa.table(columns)


def _utf8(text: str) -> str:
    """The text with lone surrogates, which a sampled answer may hold, replaced: parquet is UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Progress:
    """A bar on a terminal, elsewhere a line every few seconds: reward, headline metric, tokens/s and time left."""

    def __init__(
        self,
        total: int,
        headline: str,
        start: int = 0,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start` steps of `total` are done already (a resumed run). `clock` gives seconds."""
        self._total, self._headline, self._start, self._step = total, headline, start, start
        self._stream = sys.stderr if stream is None else stream
        self._every_s, self._clock = every_s, clock
        self._began = self._shown = self._last = clock()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=start, file=self._stream, unit="step", dynamic_ncols=True)

    def update(self, metrics: Mapping[str, float], num_tokens: int) -> None:
        """One more step is done; it generated and scored `num_tokens` tokens."""
        now = self._clock()
        rate = num_tokens / max(now - self._last, 1e-9)
        self._step, self._last = self._step + 1, now
        names = dict.fromkeys(("reward", self._headline))
        shown = {name.rpartition("/")[2]: f"{metrics[name]:.3f}" for name in names if name in metrics}
        shown["tokens/s"] = f"{rate:,.0f}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        elif now - self._shown >= self._every_s or self._step in (self._start + 1, self._total):
            self._shown = now
            left_s = (now - self._began) / (self._step - self._start) * (self._total - self._step)
            values = " · ".join(f"{name} {value}" for name, value in shown.items())
            line = f"step {self._step}/{self._total} · {values} · {tqdm.format_interval(left_s)} left"
            print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(text, file=self._stream) if self._bar is not None else print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def eval_metrics(of_tasks: Mapping[str, Mapping[str, float]], num_tasks: int) -> dict[str, float]:
    """Metrics of an evaluation by the names that a run records: eval/METRIC, or eval/TASK/METRIC of several tasks.

    >>> eval_metrics({"sums": {"exact": 0.5}}, 1), eval_metrics({"sums": {"exact": 0.5}}, 2)
    ({'eval/exact': 0.5}, {'eval/sums/exact': 0.5})
    """
    return {
        f"eval/{name}/{metric}" if num_tasks > 1 else f"eval/{metric}": value
        for name, metrics in of_tasks.items()
        for metric, value in metrics.items()
    }


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
