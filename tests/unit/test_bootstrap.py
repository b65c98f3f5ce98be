"""Intervals: those of scipy on the same draws, as wide as theory says, and the right kind for every metric."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vlm_grpo.evaluation import measure
from vlm_grpo.evaluation.bootstrap import Interval, mean_intervals, metric_intervals, percentile_interval
from vlm_grpo.evaluation.measure import Evaluation, intervals, summarise
from vlm_grpo.evaluation.predictions import Prediction
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter


def scipys_interval(
    columns: list[np.ndarray], statistic: Callable[..., Any], resamples: int, seed: int
) -> tuple[float, float]:
    """The interval that scipy finds by the same draws; of several columns a resample takes the same places."""
    paired = len(columns) > 1
    return stats.bootstrap(
        columns, statistic, paired=paired, n_resamples=resamples, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval


def ratio_of_sums(values: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
    return values.sum(axis) / counts.sum(axis)


@pytest.mark.parametrize("seed", range(12))
def test_means_have_the_intervals_of_scipy(seed: int) -> None:
    """The same generator in the same way: equal to the last digits."""
    random = np.random.default_rng(1000 + seed)
    size, resamples = int(random.integers(2, 400)), int(random.integers(20, 900))
    columns = {
        "normal": random.normal(size=size),
        "hits": (random.random(size) < 0.3).astype(float),
        "skewed": random.exponential(size=size) ** 3,
    }
    ours = mean_intervals({name: (v, np.ones(size)) for name, v in columns.items()}, resamples, seed)
    for name, values in columns.items():
        theirs = scipys_interval([values], np.mean, resamples, seed)
        assert (ours[name].low, ours[name].high) == pytest.approx(theirs, rel=1e-12, abs=1e-12)
        assert ours[name].resamples == resamples


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """300 data sets of 60 coin tosses with p = 0.4; the share of intervals that hold p is 95%, less a little, for a
    percentile interval of 60 samples is slightly narrow. Its standard error is 0.013.
    """
    random = np.random.default_rng(5)
    held = 0
    for trial in range(300):
        tosses = (random.random(60) < 0.4).astype(float)
        interval = mean_intervals({"x": (tosses, np.ones(60))}, 300, seed=trial)["x"]
        held += interval.low <= 0.4 <= interval.high
    assert 0.90 <= held / 300 <= 0.98


def test_widths_shrink_as_one_over_the_root_of_the_samples() -> None:
    random = np.random.default_rng(1)
    for size in (50, 200, 800):
        values = random.normal(size=size)
        interval = mean_intervals({"x": (values, np.ones(size))}, 4000, seed=0)["x"]
        # 1.96 standard errors on each side; the quantiles of 4000 resamples are off by some percent
        assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(size), rel=0.08)


def test_a_part_that_only_some_samples_have_is_a_ratio_of_sums() -> None:
    """As the mean over a category: resamples draw from all samples, and the denominator varies with them."""
    random = np.random.default_rng(2)
    values, has = random.random(90), (random.random(90) < 0.3).astype(float)
    ours = mean_intervals({"x": (values * has, has)}, 800, seed=7)["x"]
    assert (ours.low, ours.high) == pytest.approx(
        scipys_interval([values * has, has], ratio_of_sums, 800, seed=7), rel=1e-12
    )


def test_resamples_without_a_value_are_left_out_and_counted() -> None:
    one = np.array([1.0, 0.0, 0.0])  # the category has one sample of three: 8 of 27 resamples lack it
    interval = mean_intervals({"x": (one * 0.25, one)}, 2000, seed=0)["x"]
    assert (interval.low, interval.high) == (0.25, 0.25)
    assert interval.resamples / 2000 == pytest.approx(19 / 27, abs=0.03)
    nothing = percentile_interval(np.array([math.nan, math.nan]))
    assert nothing.resamples == 0 and math.isnan(nothing.low) and math.isnan(nothing.high)
    assert mean_intervals({}, 100, seed=0) == {}
    assert mean_intervals({"x": (np.zeros(0), np.zeros(0))}, 100, seed=0) == {}
    assert mean_intervals({"x": (one, one)}, 0, seed=0) == {}


def test_any_metric_is_resampled_as_scipy_does() -> None:
    values = np.random.default_rng(3).normal(size=40)

    def metrics(chosen: Sequence[int]) -> dict[str, float]:
        return {"median": float(np.median(values[list(chosen)]))}

    ours = metric_intervals(metrics, ["median"], 40, 300, seed=4)["median"]
    assert (ours.low, ours.high) == pytest.approx(scipys_interval([values], np.median, 300, seed=4))


class Graded(TaskAdapter):
    """Answers are numbers; metrics of several kinds are made of them."""

    headline = "median"

    def __init__(self) -> None:
        self.calls = 0

    def samples(self, split: str) -> Sequence[Sample]:
        return LazySamples([f"s{i}" for i in range(60)], lambda i: Sample(f"s{i}", [], "?", i % 3 == 0))

    def reward(self, sample: Sample, answer: str) -> Reward:
        value = float(answer)
        return Reward(value, {"hit": float(value > 0.5), **({"third": value} if sample.target else {})})

    def reference_answer(self, sample: Sample) -> str:
        return "1"

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        self.calls += 1
        values = [float(answer) for answer in answers]
        assert len(samples) == len(values) == len(rewards)
        thirds = [value for sample, value in zip(samples, values, strict=True) if sample.target]
        means = super().metrics(samples, answers, rewards)
        return {
            "average": sum(values) / len(values),  # the reward under another name
            "hit": means["hit"],
            "of_thirds": sum(thirds) / len(thirds),  # a part that some samples have
            "median": float(np.median(values)),  # no mean at all
            "percent": 100 * means["hit"],
        }


def evaluated(task: TaskAdapter, values: Sequence[float | None]) -> Evaluation:
    samples = task.samples("val")
    predictions = []
    for sample, value in zip(samples, values, strict=True):
        reward = None if value is None else task.reward(sample, str(value))
        parts = {} if reward is None else reward.parts
        predictions.append(Prediction(sample.id, str(value), None if reward is None else reward.value, parts))
    return summarise(task, samples, predictions)


@pytest.mark.slow
def test_means_of_parts_are_found_by_their_values_and_others_are_computed_anew() -> None:
    task = Graded()
    values = np.random.default_rng(6).random(60).tolist()
    evaluation = evaluated(task, values)
    task.calls = 0
    found, note = intervals(task, task.samples("val"), evaluation, resamples=400, seed=0)
    assert set(found) == {"average", "hit", "of_thirds", "median", "percent"}
    assert "; median, percent: not the mean of a reward part, 400 resamples" in note and "seed 0" in note
    assert task.calls == 3 + 1 + 400
    for name, of in (("average", np.mean), ("median", np.median)):
        theirs = scipys_interval([np.array(values)], of, 400, seed=0)
        assert (found[name].low, found[name].high) == pytest.approx(theirs)
    assert found["percent"].low == pytest.approx(100 * found["hit"].low)
    for name, interval in found.items():
        assert interval.low <= evaluation.metrics[name] <= interval.high


class Macro(Graded):
    """The mean of two means: equal to the mean over all samples only while both groups are equally large."""

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        groups = {
            kind: [float(a) for s, a in zip(samples, answers, strict=True) if (int(s.id[1:]) % 2) == kind]
            for kind in (0, 1)
        }
        return {"reward": sum(sum(group) / len(group) for group in groups.values()) / 2}


def test_a_metric_that_is_the_mean_by_chance_alone_is_not_resampled_as_one() -> None:
    task = Macro()
    evaluation = evaluated(task, np.random.default_rng(8).random(60).tolist())
    found, note = intervals(task, task.samples("val"), evaluation, resamples=50, seed=0)
    assert "reward: not the mean of a reward part" in note and found["reward"].resamples == 50


@pytest.mark.slow
def test_slow_metrics_get_fewer_resamples_on_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Graded()
    evaluation = evaluated(task, np.random.default_rng(6).random(60).tolist())
    monkeypatch.setattr(measure, "SLOW_SAMPLES", 60 * 40)
    found, note = intervals(task, task.samples("val"), evaluation, resamples=400, seed=0)
    assert (found["hit"].resamples, found["median"].resamples) == (400, 40) and "40 resamples" in note
    monkeypatch.setattr(measure, "SLOW_SAMPLES", 60)
    found, _ = intervals(task, task.samples("val"), evaluation, resamples=400, seed=0)
    assert found["median"].resamples == measure.SLOW_LEAST
    found, note = intervals(task, task.samples("val"), evaluation, resamples=0, seed=0)
    assert found == {} and "bootstrap_samples=0" in note


class Grouped(Graded):
    """The default metrics, of all samples and of two groups; every third sample is in the first of them."""

    headline = "hit"
    metrics = TaskAdapter.metrics

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Sample]] = []
        self.most_alive = 0

    def samples(self, split: str) -> Sequence[Sample]:
        def make(index: int) -> Sample:
            sample = Sample(f"s{index}", [], "?", index % 3 == 0)
            self.made.append(weakref.ref(sample))
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.made))
            return sample

        return LazySamples([f"s{i}" for i in range(60)], make)

    def groups(self, sample: Sample) -> Sequence[str]:
        return ["third"] if sample.target else ["other", "far/away"]


def test_means_of_groups_have_the_intervals_of_scipy_and_keep_no_sample_in_memory() -> None:
    task = Grouped()
    values = np.random.default_rng(6).random(60)
    evaluation = evaluated(task, values.tolist())
    hits, third = (values > 0.5).astype(float), np.arange(60) % 3 == 0
    groups = {"hit/third": third, "hit/other": ~third, "hit/far/away": ~third}
    assert list(evaluation.metrics) == ["reward", "hit", "third", *sorted(groups), "num_samples"]
    task.made, task.most_alive = [], 0
    found, note = intervals(task, task.samples("val"), evaluation, resamples=300, seed=9)
    assert set(found) == set(evaluation.metrics) - {"num_samples"} and note.endswith("300 resamples, seed 9")
    for name, has in groups.items():
        assert evaluation.metrics[name] == pytest.approx(hits[has].mean())
        theirs = scipys_interval([hits * has, has.astype(float)], ratio_of_sums, 300, seed=9)
        assert (found[name].low, found[name].high) == pytest.approx(theirs, rel=1e-12)
    # The loop's sample and the next one
    assert len(task.made) == 60 and task.most_alive <= 2


class Many(Graded):
    """Seven metrics that are no means."""

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        return {f"q{k}": float(np.quantile([float(answer) for answer in answers], k / 10)) for k in range(1, 8)}


def test_many_metrics_that_are_no_means_are_counted_in_the_note() -> None:
    task = Many()
    evaluation = evaluated(task, np.random.default_rng(8).random(60).tolist())
    _, note = intervals(task, task.samples("val"), evaluation, resamples=30, seed=0)
    assert note.endswith("; 7 other metrics: not the mean of a reward part, 30 resamples") and "q1" not in note


class Fragile(Graded):
    """Metrics that cannot bear a sample twice."""

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        if len({sample.id for sample in samples}) < len(samples):
            raise KeyError("twice")
        return {"reward": 0.5}


def test_metrics_that_fail_on_a_resample_cost_the_intervals_alone() -> None:
    task = Fragile()
    evaluation = evaluated(task, [0.5] * 60)
    assert evaluation.metrics["reward"] == 0.5
    found, note = intervals(task, task.samples("val"), evaluation, resamples=100, seed=0)
    assert found == {} and note.startswith("none: metrics() raised KeyError")


class Means(Graded):
    """Metrics are the default ones."""

    metrics = TaskAdapter.metrics


def test_answers_without_a_reward_enter_no_mean_and_no_interval() -> None:
    task = Means()
    values: list[float | None] = [0.25, None, 0.75] * 20
    evaluation = evaluated(task, values)
    assert evaluation.metrics["reward"] == 0.5
    assert (evaluation.metrics["num_samples"], evaluation.metrics["num_without_reward"]) == (40, 20)
    found, _ = intervals(task, task.samples("val"), evaluation, resamples=500, seed=1)
    assert 0.38 < found["reward"].low < 0.5 < found["reward"].high < 0.62
    nothing, _ = intervals(task, task.samples("val"), evaluated(task, [None] * 60), resamples=500, seed=1)
    assert nothing == {}


def test_an_interval_is_a_pair_with_its_count() -> None:
    assert mean_intervals({"x": (np.array([2.0]), np.ones(1))}, 10, seed=0) == {"x": Interval(2.0, 2.0, 10)}
