"""Samples, rewards and the adapter that a task is: everything a user of the package writes against."""

import math
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, overload

from PIL import Image

from vlm_grpo.common.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One question about zero or more images.

    `id` is unique in its split. `images` holds paths or loaded images, in the order in which the question speaks of
    them; a sequence that loads on access is welcome. `target` is whatever the task's own reward needs. `task` is filled
    in by a run, with the name by which it knows the sample's task.
    """

    id: str
    images: Sequence[Path | Image.Image]
    question: str
    target: Any
    task: str = ""


@dataclass(frozen=True)
class Reward:
    """What one answer earned: the value that is optimised, and named parts that are only reported."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class LazySamples(Sequence[Sample]):
    """Samples made on access, for a split whose samples are slow or large to make; its ids are known beforehand.

    Whatever `make` raises becomes a UserError that names the sample.
    """

    def __init__(self, ids: Sequence[str], make: Callable[[int], Sample]):
        self.ids = ids
        self._make = make

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySamples": ...
    def __getitem__(self, index: int | slice) -> "Sample | LazySamples":
        chosen = range(len(self.ids))[index]
        if not isinstance(chosen, int):
            return self.take(chosen)
        try:
            return self._make(chosen)
        except UserError:
            raise
        except Exception as error:  # foreign code, whose IndexError would even end a loop over the samples in silence
            raise UserError(f"sample {self.ids[chosen]!r} cannot be made: {describe(error)}") from error

    def take(self, indices: Sequence[int]) -> "LazySamples":
        """The samples at these indices, in this order."""
        return LazySamples([self.ids[index] for index in indices], lambda at: self._make(indices[at]))


Samples = LazySamples | Sequence[Sample]
"""The samples of a split. Named apart so that a check of types does not make all of them."""


class TaskAdapter(ABC):
    """A data set together with the rule that scores an answer.

    Set `coordinates` where questions and answers hold boxes or points: they are then in pixels of the sample's one
    original image, on both sides of this interface, whatever coordinates the model itself speaks.
    """

    coordinates: ClassVar[bool] = False
    headline: ClassVar[str] = "reward"
    """The key of `metrics()`, or the reward part, that progress bars and before/after tables show."""
    full_marks: ClassVar[float] = 1.0
    """The reward of a faultless answer."""
    demo_args: ClassVar[Mapping[str, Any]] = {}
    """Constructor arguments for the shipped tiny model, where the user names none."""
    reward_timeout_s: ClassVar[float | None] = None
    """Seconds after which scoring one answer is given up. Set it where `reward` runs code that may hang: it then
    runs in a process of its own, so that adapter and samples must be picklable."""
    reward_threads: ClassVar[int] = 1
    """Answers that are scored at the same time. Above 1 where `reward` may be called from several threads and waits,
    for a process or a server; without effect where `reward_timeout_s` is set."""
    metric_note: str = ""
    """How the metrics are computed (threshold, variant), as an evaluation prints it beside its numbers."""

    @abstractmethod
    def samples(self, split: str) -> Sequence[Sample]:
        """The samples of a split; raises UserError, naming the splits there are, for any other."""

    @abstractmethod
    def reward(self, sample: Sample, answer: str) -> Reward | None:
        """The reward of `answer`, the text inside the answer tags; None if it cannot be judged. No text may raise."""

    @abstractmethod
    def reference_answer(self, sample: Sample) -> str:
        """An answer that scores full marks."""

    def prepare_reward(self) -> None:  # noqa: B027
        """Loads what `reward` needs, in the process of `reward_timeout_s`, before the time of any answer runs."""

    def overdue_reward(self, sample: Sample) -> Reward | None:
        """The reward of an answer that was not scored within `reward_timeout_s`; None: it has none and enters no mean.

        Where the metric's denominator is all samples, this is a reward of 0 with all its parts.
        """
        return None

    def reference_thought(self, sample: Sample) -> str:
        """A thought that leads to the reference answer, for the supervised warm start; empty where there is none."""
        return ""

    def groups(self, sample: Sample) -> Sequence[str]:
        """Names of the parts of the benchmark that the sample belongs to, for each of which the headline is reported as
        well.
        """
        return ()

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        """Metrics of one answer per sample: the means of all `metric_terms`, by name; a mean's denominator is the
        answers that have the term.

        Confidence intervals come from resamples, in which a sample may stand several times: it then counts as often.
        Means of `metric_terms` are resampled fastest.
        """
        columns: dict[str, list[float]] = {}
        for reward, groups in zip(rewards, groups_of(self, samples), strict=True):
            for name, value in metric_terms(self.headline, reward, groups).items():
                columns.setdefault(name, []).append(value)
        # The groups' behind all others, by name
        names = sorted(columns, key=lambda name: name if name.startswith(f"{self.headline}/") else "")
        return {name: math.fsum(columns[name]) / len(columns[name]) for name in names}

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """Files that the benchmark's own evaluation reads, by name: one answer per sample, in the benchmark's format.

        An evaluation writes them beside its metrics, for every sample that was answered.
        """
        return {}

    def is_correct(self, reward: Reward) -> bool:
        """Whether an answer counts as right in pass@k: its headline part, or else its reward, is full."""
        part = reward.parts.get(self.headline)
        return reward.value >= self.full_marks - 1e-6 if part is None else part >= 1 - 1e-6

    def normalised(self, sample: Sample, answer: str) -> str:
        """The form in which answers are counted where they vote: equal forms are votes for the same answer."""
        return answer.strip().casefold()


def metric_terms(headline: str, reward: Reward, groups: Sequence[str]) -> dict[str, float]:
    """What an answer adds to the default metrics: its reward, the reward's parts (but for one called "reward"), and for
    each of its sample's groups the headline, if the reward has it.

    >>> metric_terms("hit", Reward(0.5, {"hit": 1.0}), ["easy"])
    {'reward': 0.5, 'hit': 1.0, 'hit/easy': 1.0}
    """
    terms = {"reward": reward.value, **{part: value for part, value in reward.parts.items() if part != "reward"}}
    return terms | {f"{headline}/{group}": terms[headline] for group in groups if headline in terms}


def groups_of(adapter: TaskAdapter, samples: Samples) -> Iterable[Sequence[str]]:
    """The groups of each sample, none of which is made where the task has no groups."""
    if type(adapter).groups is TaskAdapter.groups:
        return ((),) * len(samples)
    return map(adapter.groups, samples)


Tasks = TaskAdapter | Mapping[str, TaskAdapter]
"""One task, or the tasks of a run by the names that its samples have in `Sample.task`."""


def by_name(tasks: Tasks) -> Mapping[str, TaskAdapter]:
    """The tasks by name; the name of one that comes without is that of samples outside a run: empty."""
    return {"": tasks} if isinstance(tasks, TaskAdapter) else tasks


def task_name(adapter: TaskAdapter) -> str:
    """The name of an adapter in messages."""
    return f"{type(adapter).__module__}:{type(adapter).__qualname__}"


def describe(error: BaseException, task: type[TaskAdapter] = TaskAdapter) -> str:
    """What foreign code raised, and where: in the task's own file, if the error came through it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    kinds = [kind for kind in task.__mro__ if issubclass(kind, TaskAdapter) and kind is not TaskAdapter]
    own = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    frame = next((f for f in reversed(frames) if f.filename in own), frames[-1] if frames else None)
    return f"{type(error).__name__}: {error}{f' at {frame.filename}:{frame.lineno}' if frame else ''}"
