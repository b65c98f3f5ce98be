"""How sure a metric is: percentile bootstrap intervals over samples. Letters: N samples, B resamples.

A resample draws N of the N samples with replacement; the interval holds the middle 95% of the metric over B resamples
(B. Efron, "Bootstrap methods: another look at the jackknife", 1979). Samples are taken to be independent: questions
that share an image make the true interval wider.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Ends of a 95% interval, and how many resamples it was taken from."""

    low: float
    high: float
    resamples: int


def percentile_interval(estimates: np.ndarray) -> Interval:
    """The middle 95% of the estimates (B,); NaN, from resamples on which the metric has no value, is left out."""
    known = estimates[~np.isnan(estimates)]
    if len(known) == 0:
        return Interval(np.nan, np.nan, 0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(low), float(high), len(known))


def mean_intervals(
    columns: Mapping[str, tuple[np.ndarray, np.ndarray]], resamples: int, seed: int
) -> dict[str, Interval]:
    """Intervals of means. A column is (sums, counts), both (N,): what each sample adds to the mean's numerator and to
    its denominator. All columns see the same resamples.

    >>> import numpy as np
    >>> mean_intervals({"accuracy": (np.array([1.0, 1.0, 1.0]), np.ones(3))}, resamples=100, seed=0)
    {'accuracy': Interval(low=1.0, high=1.0, resamples=100)}
    """
    size = len(next(iter(columns.values()))[0]) if columns else 0
    if size == 0 or resamples == 0:
        return {}
    generator = np.random.default_rng(seed)
    estimates = {name: np.empty(resamples) for name in columns}
    places = {name: np.flatnonzero(counts) for name, (_, counts) in columns.items()}  # few where it is a group's mean
    shares = {name: (sums[places[name]], counts[places[name]]) for name, (sums, counts) in columns.items()}
    for number in range(resamples):
        times = np.bincount(generator.integers(0, size, size), minlength=size).astype(float)
        for name, (sums, counts) in shares.items():
            drawn = times[places[name]]
            with np.errstate(invalid="ignore"):  # 0 / 0: no sample of the resample counts
                estimates[name][number] = (drawn @ sums) / (drawn @ counts)
    return {name: percentile_interval(values) for name, values in estimates.items()}


def metric_intervals(
    metrics: Callable[[Sequence[int]], Mapping[str, float]], names: Iterable[str], size: int, resamples: int, seed: int
) -> dict[str, Interval]:
    """Intervals of any metrics: `metrics(indices)` computes them on a resample, which holds some samples repeatedly."""
    generator = np.random.default_rng(seed)
    found = [metrics(generator.integers(0, size, size).tolist()) for _ in range(resamples)]
    columns = {name: np.array([values.get(name, np.nan) for values in found], dtype=float) for name in names}
    return {name: percentile_interval(values) for name, values in columns.items()}
