"""Training runs as their folders tell of them: what was logged at each step, and which runs differ only by their seed.

Letters: n points of a curve.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from vlm_grpo.algorithm.diagnostics import SPIKE, SpikeScore
from vlm_grpo.common.errors import UserError
from vlm_grpo.data.tasks import TaskConfig, task_names
from vlm_grpo.runs.folder import CONFIG_FILE, FREE_OPTIONS

METRICS_FILE = "metrics.jsonl"
Axis = Literal["steps", "seconds", "tokens"]
# Options by which two runs of one variation may differ
OWN_OPTIONS = FREE_OPTIONS | {"seed", "rollout_steps", "save_steps"}
LAST = 0.1  # the share of a run's steps at its end that the table's reward is a mean over


@dataclass(frozen=True)
class RunRecord:
    """One run: its options and the rows of its metrics file, in their order."""

    folder: Path
    options: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @cached_property
    def trained(self) -> list[Mapping[str, Any]]:
        """The rows of training steps; that of step 0 holds an evaluation alone."""
        return [row for row in self.rows if "reward" in row]

    def column(self, name: str) -> np.ndarray:
        """A metric of the training steps; NaN where there is none."""
        return np.array([_number(row.get(name)) for row in self.trained])

    def along(self, axis: Axis) -> np.ndarray:
        """Where each training step ends: its number, or what was spent up to there."""
        if axis == "steps":
            return self.column("step")
        if axis == "tokens":
            return _running_sum(self.column("num_tokens") + np.nan_to_num(self.column("resampled_tokens")))
        return _running_sum(self.step_seconds)

    @property
    def step_seconds(self) -> np.ndarray:
        """Of each training step, without evaluations, saving and looks at the gradient."""
        return self.column("step_time") - np.nan_to_num(self.column("time/diagnostics"))

    def evaluated(self, axis: Axis, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Where the run was evaluated, and the metric there, of steps that were trained, and of what was before."""
        spent = {0.0: 0.0} | dict(zip(self.column("step"), self.along(axis), strict=True))
        points = [
            (spent[row["step"]], _number(row[metric])) for row in self.rows if metric in row and row["step"] in spent
        ]
        return np.array([x for x, _ in points]), np.array([y for _, y in points])

    @cached_property
    def spike_scores(self) -> np.ndarray:
        """The spike score of each step as logged, or of its mean gradient norm for runs that have not logged it."""
        if any("grad_spike_score" in row for row in self.trained):
            return self.column("grad_spike_score")
        spikes = SpikeScore()
        return np.array([spikes.add(norm) for norm in self.column("grad_norm")])

    @property
    def spike_share(self) -> float:
        """GSS@10: share of optimiser steps whose spike score is above 10."""
        logged = [row["grad_spike_share"] for row in self.trained if row.get("grad_spike_share") is not None]
        if logged:
            return float(logged[-1])
        scores = self.spike_scores[~np.isnan(self.spike_scores)]
        return float((scores > SPIKE).mean()) if len(scores) else math.nan

    @property
    def final_reward(self) -> float:
        """Mean reward over the last tenth of the steps."""
        rewards = self.column("reward")
        return mean(rewards[len(rewards) - max(1, round(LAST * len(rewards))) :])


@dataclass(frozen=True)
class Variation:
    """Runs that differ by their seed alone."""

    name: str
    runs: Sequence[RunRecord]


@dataclass(frozen=True)
class Curve:
    """Mean over runs with a band of one sample standard deviation on each side (of no width for one run)."""

    x: np.ndarray  # (n,)
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run folders among these folders and everything below them. Raises: UserError for a folder without any."""
    found: dict[Path, Path] = {}  # by what a folder is, whatever it is called
    for folder in folders:
        below = sorted(path.parent for path in folder.rglob(METRICS_FILE)) if folder.is_dir() else []
        if not below:
            raise UserError(
                f"{folder}: there is no run in it (no {METRICS_FILE}); name output folders of training runs"
            )
        for path in below:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_run(folder: Path) -> RunRecord:
    """What the run has left so far. Raises: UserError, with file and line, for what is no run's file."""
    path = folder / CONFIG_FILE
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the options of the run cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: holds no options of a run")
    lines = (folder / METRICS_FILE).read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a run that is being written, or was killed
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
            float(rows[-1]["step"])
            if wrong := [name for name, value in rows[-1].items() if not isinstance(value, int | float | None)]:
                raise ValueError(f"{wrong[0]} is {rows[-1][wrong[0]]!r}, no number")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / METRICS_FILE}:{number}: no row of metrics: {error}") from error
    return RunRecord(folder, options, rows)


def variations(runs: Sequence[RunRecord]) -> list[Variation]:
    """Runs with equal options, seeds apart, belong together; in the order of the first of each.

    A variation is named as its folders are without `-seed-N`; where these names differ within it or are not its own, it
    is named T{num_thoughts}A{num_answers} and by the options that tell it from the others.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        own = {name: value for name, value in run.options.items() if name not in OWN_OPTIONS}
        groups.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    stems = [{_stem(run.folder) for run in group} for group in groups.values()]
    used = [stem for group in stems for stem in group]
    good = all(len(group) == 1 and used.count(next(iter(group))) == 1 and "" not in group for group in stems)
    names = [next(iter(group)) for group in stems] if good else _names_by_options([g[0] for g in groups.values()])
    return [Variation(name, group) for name, group in zip(names, groups.values(), strict=True)]


def _stem(folder: Path) -> str:
    name = folder.resolve().name
    return re.sub(r"[-_.]?seed[-_=]?\d+$", "", name)


def _names_by_options(runs: Sequence[RunRecord]) -> list[str]:
    flat = [dict(_flattened(run.options)) for run in runs]
    hidden = OWN_OPTIONS | {"num_thoughts", "num_answers"}
    keys = dict.fromkeys(key for options in flat for key in options)
    differ = [key for key in keys if key not in hidden and len({str(options.get(key)) for options in flat}) > 1]
    names = []
    for options in flat:
        short = f"T{options.get('num_thoughts')}A{options.get('num_answers')}"
        names.append(" ".join([short, *(f"{key}={options.get(key)}" for key in differ)]))
    return names


def _flattened(options: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def eval_metrics(runs: Sequence[RunRecord], wanted: str | None = None) -> list[str]:
    """The metrics of the held-out split to show: the one that is wanted, else the first that the runs have, of several
    tasks the first of each. A run logs a task's headline first.

    Raises: UserError, naming those there are, for one that no run has.
    """
    counts = ("num_samples",)
    names = dict.fromkeys(
        name
        for run in runs
        for row in run.rows
        for name in row
        if name.startswith("eval/") and not name.endswith(counts)
    )
    if wanted is None:
        several = [run.options["task"] for run in runs if isinstance(run.options.get("task"), list)]
        tasks = dict.fromkeys(
            name for entries in several if len(entries) > 1 for name in task_names(TaskConfig(entries))
        )
        firsts: dict[str, str] = {}  # by task
        for name in names:
            firsts.setdefault(next((task for task in tasks if name.startswith(f"eval/{task}/")), ""), name)
        return list(firsts.values())
    chosen = wanted if wanted in names else f"eval/{wanted}"
    if chosen not in names:
        raise UserError(f"metric={wanted}: no run has it; they have {', '.join(names) or 'no evaluations'}")
    return [chosen]


def training_curve(variation: Variation, metric: str, axis: Axis, window: int = 1) -> Curve | None:
    """A metric of the training steps, each run's a mean over the last `window` steps; None where no run has it."""
    lines = [(run.along(axis), _running_mean(run.column(metric), window)) for run in variation.runs]
    return _curve(lines)


def eval_curve(variation: Variation, metric: str, axis: Axis) -> Curve | None:
    """A metric of the held-out split; None where no run has it."""
    return _curve([run.evaluated(axis, metric) for run in variation.runs])


def _curve(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> Curve | None:
    """Mean and band of lines (x, y), at their own points where these are the same, else at 200 between their ends."""
    lines = [(x[~np.isnan(y)], y[~np.isnan(y)]) for x, y in lines]
    lines = [(x, y) for x, y in lines if len(x)]
    if not lines:
        return None
    x = lines[0][0]
    if any(not np.array_equal(x, other) for other, _ in lines):
        first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
        x = np.linspace(first, max(first, last), 200)
    values = np.stack([np.interp(x, own, y) for own, y in lines])  # (runs, n)
    middle = values.mean(0)
    band = values.std(0, ddof=1) if len(lines) > 1 else np.zeros(len(x))
    return Curve(x, middle, middle - band, middle + band)


def _running_sum(values: np.ndarray) -> np.ndarray:
    """At each place the sum of the values up to it; one that is missing (NaN) counts as the mean of the others."""
    return np.cumsum(np.where(np.isnan(values), mean(values), values))


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """At each place the mean of the last `window` values that are numbers, those that there are so far."""
    known = ~np.isnan(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(known, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], known]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    count = counts[last] - counts[first]
    return np.where(count > 0, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)


def mean(values: Iterable[float]) -> float:
    """Over the values that are numbers; NaN where there is none."""
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def median(values: Iterable[float]) -> float:
    """Of the values that are numbers; NaN where there is none."""
    known = [float(value) for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def spread(values: Iterable[float]) -> float:
    """Sample standard deviation over the values that are numbers; NaN for fewer than two."""
    known = [float(value) for value in values if not math.isnan(value)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
