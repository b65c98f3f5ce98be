"""Lays out tables of text for a terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str = "<>") -> str:
    """The rows as lines of text, with columns two spaces apart and no spaces at the end of a line.

    Each character of `sides` aligns one column to the left (<) or the right (>); the last one holds for the rest.

    >>> print(aligned([("metric", "before", "after"), ("reward", "0.25", "0.5")]))
    metric  before  after
    reward    0.25    0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), sides[-1]), widths, strict=True)]
    return "\n".join("  ".join(map(format, row, forms)).rstrip() for row in rows)
