"""From predictions to numbers: the task's metrics, pass@k and votes, and how sure each of them is.

Letters: N samples that were answered, n answers of each (K thoughts × M answers).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlm_grpo.common.errors import UserError
from vlm_grpo.evaluation.bootstrap import Interval, mean_intervals, metric_intervals
from vlm_grpo.evaluation.pass_at_k import majority, pass_at_k, sizes, tree_pass_at_k
from vlm_grpo.evaluation.predictions import Prediction
from vlm_grpo.task.interface import (
    LazySamples,
    Reward,
    Sample,
    Samples,
    TaskAdapter,
    describe,
    groups_of,
    metric_terms,
    task_name,
)

# A metric that is no mean of reward parts is computed anew on every resample: on so many samples in all, at least
SLOW_SAMPLES, SLOW_LEAST = 250_000, 25
MOST_NAMED = 4  # metrics in the note on how their intervals were made


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a split and the predictions behind them, in the order of the samples."""

    metrics: dict[str, float]
    predictions: list[Prediction]


@dataclass(frozen=True)
class Answered:
    """The samples of a split that were answered, and the n answers of each."""

    adapter: TaskAdapter
    samples: Samples  # N
    answers: Sequence[Sequence[Prediction]]  # N × n, thought by thought

    def metrics(self, chosen: Sequence[int]) -> dict[str, float]:
        """Metrics over the samples of these indices, which may repeat.

        With several answers of each, the task's own metrics are computed for the first answers, for the second ones
        and so on, and their means are given; what only several answers have (pass@k, …) stands beside them.
        """
        draws = [self._metrics_of_draw(chosen, draw) for draw in range(len(self.answers[0]) if self.answers else 0)]
        names = dict.fromkeys(name for metrics in draws for name in metrics)
        found = {name: _mean([metrics[name] for metrics in draws if name in metrics]) for name in names}
        for name in self.of_several[0] if self.of_several else ():
            found[name] = _mean([self.of_several[i][name] for i in chosen])
        return found

    def _metrics_of_draw(self, chosen: Sequence[int], draw: int) -> dict[str, float]:
        scored = [i for i in chosen if self.answers[i][draw].reward is not None]
        if not scored:
            return {}
        predictions = [self.answers[i][draw] for i in scored]
        rewards = [Reward(p.reward, p.parts) for p in predictions if p.reward is not None]
        return self.adapter.metrics(take(self.samples, scored), [p.answer for p in predictions], rewards)

    @cached_property
    def of_several(self) -> list[dict[str, float]]:
        """For each sample, what its answers are worth together; empty where each has only one."""
        if not self.answers or len(self.answers[0]) == 1:
            return []
        return [self._of_several(sample, answers) for sample, answers in zip(self.samples, self.answers, strict=True)]

    def _of_several(self, sample: Sample, answers: Sequence[Prediction]) -> dict[str, float]:
        """pass@k over thoughts and over all answers, and the answer that most vote for; see pass_at_k.py."""
        thoughts: dict[int, list[Prediction]] = {}
        for answer in answers:
            thoughts.setdefault(answer.thought_index, []).append(answer)
        correct = [[self._is_correct(answer) for answer in of_thought] for of_thought in thoughts.values()]
        found = {f"pass@{k}": pass_at_k(correct, k) for k in sizes(len(correct))}
        firsts = [of_thought[0] for of_thought in thoughts.values()]
        votes = {f"maj@{len(firsts)}": firsts} if len(firsts) > 1 else {}
        if len(answers) > len(firsts):
            found |= {f"tree_pass@{k}": tree_pass_at_k(correct, k) for k in sizes(len(answers)) if k > 1}
            votes[f"tree_maj@{len(answers)}"] = list(answers)
        for name, voters in votes.items():
            winner = voters[majority([self.adapter.normalised(sample, voter.answer) for voter in voters])]
            found[name] = float(self._is_correct(winner))
            found[name.replace("maj", "maj_reward")] = winner.reward or 0.0
        return found

    def _is_correct(self, prediction: Prediction) -> bool:
        if prediction.reward is None:
            return False
        return bool(self.adapter.is_correct(Reward(prediction.reward, prediction.parts)))

    def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Means over samples, as what each sample adds to numerator and denominator: reward, parts, pass@k, …"""
        size = len(self.samples)
        columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for i, groups in enumerate(groups_of(self.adapter, self.samples)):
            for answer in self.answers[i]:
                if answer.reward is None:
                    continue
                reward = Reward(answer.reward, answer.parts)
                for name, value in metric_terms(self.adapter.headline, reward, groups).items():
                    if name not in columns:
                        columns[name] = np.zeros(size), np.zeros(size)
                    columns[name][0][i] += value
                    columns[name][1][i] += 1
        for name in self.of_several[0] if self.of_several else ():
            values = np.array([numbers[name] for numbers in self.of_several])
            columns[name] = values, np.ones(len(values))
        return columns


def answered(adapter: TaskAdapter, samples: Samples, predictions: Sequence[Prediction]) -> Answered:
    """The samples that were answered, in their order, with their answers."""
    rows: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        rows.setdefault(prediction.id, []).append(prediction)
    ids = sample_ids(samples)
    chosen = [i for i, key in enumerate(ids) if key in rows]
    return Answered(adapter, take(samples, chosen), [rows[ids[i]] for i in chosen])


def sample_ids(samples: Samples) -> Sequence[str]:
    """The ids of a split, without making its samples where that takes time."""
    return samples.ids if isinstance(samples, LazySamples) else [sample.id for sample in samples]


def take(samples: Samples, chosen: Sequence[int]) -> Samples:
    """The samples of these indices."""
    return samples.take(chosen) if isinstance(samples, LazySamples) else [samples[i] for i in chosen]


def summarise(adapter: TaskAdapter, samples: Samples, predictions: Sequence[Prediction]) -> Evaluation:
    """The task's metrics over the predictions that have a reward; the others, if any, are counted beside them."""
    scored = answered(adapter, samples, predictions)
    try:
        metrics = scored.metrics(range(len(scored.samples)))
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(f"task {task_name(adapter)}: metrics() raised {describe(error)}") from error
    scored_samples = sum(any(p.reward is not None for p in row) for row in scored.answers)
    metrics = {**metrics, "num_samples": float(scored_samples)}
    without = sum(prediction.reward is None for prediction in predictions)
    if without:
        metrics["num_without_reward"] = float(without)
    return Evaluation(metrics, list(predictions))


def intervals(
    adapter: TaskAdapter, samples: Samples, evaluation: Evaluation, resamples: int, seed: int
) -> tuple[dict[str, Interval], str]:
    """95% intervals of the metrics by name, and how they were made.

    The default metrics of one answer to each sample are means of columns. Any other metric that is one is resampled as
    one, too; that it is one is seen on the split itself and on two resamples. What remains is computed anew on each of
    fewer resamples (see SLOW_SAMPLES).
    """
    scored = answered(adapter, samples, evaluation.predictions)
    size = len(scored.samples)
    if resamples == 0 or size == 0:
        return {}, "none: bootstrap_samples=0" if resamples == 0 else "none: no sample was answered"
    note = f"95%, percentile bootstrap over samples, {resamples} resamples, seed {seed}"
    try:
        if type(adapter).metrics is TaskAdapter.metrics and len(scored.answers[0]) == 1:
            return _with_estimates(mean_intervals(scored.columns(), resamples, seed)), note
        scored = replace(scored, samples=list(scored.samples))  # made once, not in each resample
        columns = scored.columns()
        of_metric = _means_that_are_metrics(scored, columns, seed)
        found = mean_intervals({name: columns[column] for name, column in of_metric.items()}, resamples, seed)
        others = [name for name in scored.metrics(range(size)) if name not in of_metric]
        if others:
            fewer = min(resamples, max(SLOW_LEAST, SLOW_SAMPLES // size))
            found |= metric_intervals(scored.metrics, others, size, fewer, seed)
            said = ", ".join(others) if len(others) <= MOST_NAMED else f"{len(others)} other metrics"
            note += f"; {said}: not the mean of a reward part, {fewer} resamples"
    except Exception as error:  # an adapter is foreign code, and resamples are no reason to lose an evaluation
        return {}, f"none: metrics() raised {describe(error)} on a resample"
    return _with_estimates(found), note


def _with_estimates(found: Mapping[str, Interval]) -> dict[str, Interval]:
    return {name: interval for name, interval in found.items() if interval.resamples}


def _means_that_are_metrics(
    scored: Answered, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], seed: int
) -> dict[str, str]:
    """For each metric that is the mean of a column, that column: of the same name, if it is that one's."""
    size = len(scored.samples)
    generator = np.random.default_rng([seed, 1])
    views = [np.arange(size), *(generator.integers(0, size, size) for _ in range(2))]
    metrics = [scored.metrics(view.tolist()) for view in views]
    means = {
        name: [float(sums[view].sum()) / float(counts[view].sum() or math.nan) for view in views]
        for name, (sums, counts) in columns.items()
    }
    found = {}
    for name in metrics[0]:
        values = [of_view.get(name, math.nan) for of_view in metrics]
        same = [column for column in means if np.allclose(values, means[column], rtol=1e-9, atol=1e-9, equal_nan=True)]
        if same:
            found[name] = name if name in same else same[0]
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
