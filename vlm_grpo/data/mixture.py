"""Which samples of which tasks each step sees."""

import copy
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import torch

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import PromptReader, epoch_indices
from vlm_grpo.data.tasks import split_samples
from vlm_grpo.task.interface import Sample, Samples, TaskAdapter, describe


@dataclass
class MixtureConfig:
    """Shares of the tasks."""

    ROOM = "task and data"

    # Prompts of each task in proportion to each other, in the order of `task`, as in [2,1]; none: as many of each
    task_weights: list[float] | None = None


class StepSamples(Sequence[Sample]):
    """The samples of one step, each made once, when it is first asked for, and marked with its task's name."""

    def __init__(self, draws: Sequence[tuple[str, int]], make: Callable[[str, int], Sample]) -> None:
        self._draws, self._make = draws, make
        self._made: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self._draws)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        place = range(len(self))[place]
        if place not in self._made:
            self._made[place] = self._make(*self._draws[place])
        return self._made[place]

    def made(self, places: Iterable[int]) -> list[Sample]:
        """Those at these places, up to the first that cannot be made, which raises when it is asked for."""
        samples = []
        for place in places:
            try:
                samples.append(self[place])
            except UserError:
                break
        return samples


class Mixture:
    """The training samples of one or several tasks, and whose turn it is. Draws are a function of step and seed alone.

    Of `weights` w that add up to 1, task i has between n·w_i - 1 and n·w_i + 1 of the first n prompts, for every n. The
    task of a place within a step is shuffled, so that minibatches and processes get their share of each.
    """

    def __init__(self, samples: Mapping[str, Samples], weights: Sequence[float] | None, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._parts = whole_parts(weights, list(samples))
        self._turns: list[str] = []  # whose turn it was from the first prompt on, as far as it was asked for

    def __len__(self) -> int:
        return sum(map(len, self.samples.values()))

    def step(self, number: int, per_step: int) -> StepSamples:
        """The samples of step 1, 2, …"""
        first, last = (number - 1) * per_step, number * per_step
        if len(self.samples) == 1:
            [(name, samples)] = self.samples.items()
            return StepSamples([(name, i) for i in epoch_indices(len(samples), first, per_step, self.seed)], self._make)
        turns = self._turns_until(last)
        draws: list[tuple[str, int]] = []
        for name, samples in self.samples.items():
            before, count = turns[:first].count(name), turns[first:last].count(name)
            # A seed of the task's own: what it draws does not depend on its neighbours
            seed = self.seed ^ zlib.crc32(name.encode())
            draws.extend((name, i) for i in epoch_indices(len(samples), before, count, seed))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(per_step, generator=generator).tolist()
        return StepSamples([draws[i] for i in order], self._make)

    def _turns_until(self, count: int) -> list[str]:
        """Whose turn it is at the first `count` prompts: of the tasks that are behind their share, that whose next
        prompt is due first, which is when its share comes to a whole number of prompts.
        """
        parts, total = self._parts, sum(self._parts.values())
        period = math.lcm(*parts.values())
        drawn = {name: self._turns.count(name) for name in parts}
        for n in range(len(self._turns) + 1, count + 1):
            behind = [name for name in parts if n * parts[name] > drawn[name] * total]
            turn = min(behind, key=lambda name: (drawn[name] + 1) * (period // parts[name]))
            drawn[turn] += 1
            self._turns.append(turn)
        return self._turns[:count]

    def _make(self, name: str, index: int) -> Sample:
        try:
            sample = copy.copy(self.samples[name][index])
        except UserError as error:
            raise UserError(f"task {name}: {error}" if name else str(error)) from error
        except Exception as error:  # an adapter's own sequence is foreign code
            raise UserError(f"task {name}: its sample {index} cannot be made: {describe(error)}") from error
        object.__setattr__(sample, "task", name)
        return sample


class ComingSteps:
    """Gives each step its samples, while the reader's workers read those of the next."""

    def __init__(self, mixture: Mixture, per_step: int, last: int, reader: PromptReader, processes: Processes) -> None:
        self._mixture, self._per_step, self._last = mixture, per_step, last
        self._reader, self._processes = reader, processes
        self._expected: dict[int, StepSamples] = {}

    def samples(self, number: int) -> StepSamples:
        """Of step `number`, for all processes."""
        for coming in range(number, min(number + 1, self._last) + 1):
            if coming not in self._expected:
                samples = self._expected[coming] = self._mixture.step(coming, self._per_step)
                self._reader.expect(samples.made(self._processes.share(len(samples))))
        return self._expected.pop(number)


def whole_parts(weights: Sequence[float] | None, names: Sequence[str]) -> dict[str, int]:
    """Whole numbers in the proportions of the weights, which are read as the decimals they were written as.

    >>> whole_parts([0.5, 0.25], ["a", "b"])
    {'a': 2, 'b': 1}
    """
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(
            f"task_weights={list(weights)}: must be a number above 0 for each of the tasks {', '.join(names)}, in order"
        )
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return {name: int(weight * common) for name, weight in zip(names, exact, strict=True)}


def check_mixture(names: Sequence[str], weights: Sequence[float] | None, splits: Mapping[str, str | list[str]]) -> None:
    """Raise UserError for weights or splits (by the option that names them) that are not one for each of the tasks."""
    whole_parts(weights, names)
    for option, value in splits.items():
        splits_of(option, value, names)


def splits_of(option: str, value: str | Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The split of each task: one for all of them, or a list in their order; empty where there is none."""
    if option == "eval_split" and value in ("none", "null"):
        value = ""
    if isinstance(value, str):
        return dict.fromkeys(names, value)
    if len(value) != len(names):
        raise UserError(f"{option}={list(value)}: must be one split, or one for each of the tasks {', '.join(names)}")
    return dict(zip(names, value, strict=True))


def samples_of(
    tasks: Mapping[str, TaskAdapter], splits: Mapping[str, str], limit: int | None, option: str = "train_split"
) -> dict[str, Samples]:
    """The samples of each task's split, which `option` names: at most `limit` of each."""
    hint = "" if option == "train_split" else f"; {option}= for none"
    samples: dict[str, Samples] = {}
    for name, split in splits.items():
        try:
            samples[name] = split_samples(tasks[name], split, limit)
        except UserError as error:
            raise UserError(f"{option}={split}: {error}{hint}") from error
    return samples
