"""Samples, rewards and the base class of task adapters: the interface for writing a task."""

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

    `id` is unique in its split. `images` holds paths or loaded images, in the order in which the question mentions
    them; it may be a sequence that loads an image on access. `target` is anything that the task's reward needs. A run
    sets `task` to the name it gives the sample's task.
    """

    id: str
    images: Sequence[Path | Image.Image]
    question: str
    target: Any
    task: str = ""


@dataclass(frozen=True)
class Reward:
    """The reward of one answer: `value` is optimised, the named `parts` are only reported."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class LazySamples(Sequence[Sample]):
    """The samples of a split, each made by `make(index)` on access; for samples that are slow or large to make.

    The ids of the split are known beforehand. An exception of `make` becomes a UserError that names the sample.
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
        except Exception as error:  # foreign code: an IndexError would end a loop over the samples without a message
            raise UserError(f"sample {self.ids[chosen]!r} cannot be made: {describe(error)}") from error

    def take(self, indices: Sequence[int]) -> "LazySamples":
        """The samples at these indices, in this order."""
        return LazySamples([self.ids[index] for index in indices], lambda at: self._make(indices[at]))


Samples = LazySamples | Sequence[Sample]
"""The samples of a split. LazySamples is named first, so that a type check at run time does not make every sample."""


class TaskAdapter(ABC):
    """A data set and the rule that gives an answer its reward.

    Set `coordinates` if questions and answers contain boxes or points. Each sample then has exactly one image, and all
    coordinates that the adapter writes and receives are pixels of that original image. The trainer converts them to and
    from the coordinates that the model uses.
    """

    coordinates: ClassVar[bool] = False
    headline: ClassVar[str] = "reward"
    """The most important metric, which progress bars and before/after tables show: a key of `metrics()`, or a reward
    part."""
    full_marks: ClassVar[float] = 1.0
    """The reward of a faultless answer."""
    demo_args: ClassVar[Mapping[str, Any]] = {}
    """Constructor arguments for runs of the shipped tiny model; arguments that the user gives win."""
    reward_timeout_s: ClassVar[float | None] = None
    """Seconds that `reward` may take for one answer; None: no limit. Set it if `reward` runs code that may hang.
    Rewards are then computed in another process, so adapter and samples must be picklable."""
    reward_threads: ClassVar[int] = 1
    """Number of threads that call `reward` at the same time. Set it above 1 if `reward` is thread-safe and waits for a
    process or a server. It has no effect where `reward_timeout_s` is set."""
    metric_note: str = ""
    """How the metrics are computed (threshold, variant); an evaluation prints it beside its numbers."""

    @abstractmethod
    def samples(self, split: str) -> Sequence[Sample]:
        """The samples of a split.

        Raises: UserError for an unknown split; it names the known ones.
        """

    @abstractmethod
    def reward(self, sample: Sample, answer: str) -> Reward | None:
        """The reward of `answer`, the text inside the answer tags; None if it cannot have one. No text may raise."""

    @abstractmethod
    def reference_answer(self, sample: Sample) -> str:
        """An answer that earns `full_marks`."""

    def prepare_reward(self) -> None:  # noqa: B027
        """Load what `reward` needs. With `reward_timeout_s`, it runs in the reward's process before any answer's time
        is measured.
        """

    def overdue_reward(self, sample: Sample) -> Reward | None:
        """The reward of an answer for which `reward` took longer than `reward_timeout_s`.

        None leaves the answer out of every mean. If the metric's denominator is all samples, return a reward of 0 with
        all its parts.
        """
        return None

    def reference_thought(self, sample: Sample) -> str:
        """A thought that leads to the reference answer, for supervised training; empty if there is none."""
        return ""

    def groups(self, sample: Sample) -> Sequence[str]:
        """Names of the sample's groups, such as a question type. The headline is also reported for each group."""
        return ()

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        """Metrics by name, given one answer and its reward per sample.

        The default is the mean of each of the `metric_terms`, over the answers that have the term. Confidence intervals
        are bootstrapped: `samples` may then contain a sample several times, and each occurrence counts. The default
        metrics are the fastest to bootstrap.
        """
        columns: dict[str, list[float]] = {}
        for reward, groups in zip(rewards, groups_of(self, samples), strict=True):
            for name, value in metric_terms(self.headline, reward, groups).items():
                columns.setdefault(name, []).append(value)
        # Metrics of groups come last, sorted by name
        names = sorted(columns, key=lambda name: name if name.startswith(f"{self.headline}/") else "")
        return {name: math.fsum(columns[name]) / len(columns[name]) for name in names}

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """Files for the benchmark's own evaluation: from file name to content, in the benchmark's format.

        An evaluation writes them beside its metrics. `samples` are those that were answered, one answer each.
        """
        return {}

    def is_correct(self, reward: Reward) -> bool:
        """Whether an answer counts as right in pass@k.

        It does if the reward part named `headline` is 1; without such a part, if the reward reaches `full_marks`.
        """
        part = reward.parts.get(self.headline)
        return reward.value >= self.full_marks - 1e-6 if part is None else part >= 1 - 1e-6

    def normalised(self, sample: Sample, answer: str) -> str:
        """The answer as majority voting compares it: answers with equal normalised texts vote for the same answer."""
        return answer.strip().casefold()


def metric_terms(headline: str, reward: Reward, groups: Sequence[str]) -> dict[str, float]:
    """The terms of one answer in the means of the default metrics.

    They are the reward, its parts (except a part called "reward"), and the headline once more for each of the sample's
    `groups`, if the reward has it.

    >>> metric_terms("hit", Reward(0.5, {"hit": 1.0}), ["easy"])
    {'reward': 0.5, 'hit': 1.0, 'hit/easy': 1.0}
    """
    terms = {"reward": reward.value, **{part: value for part, value in reward.parts.items() if part != "reward"}}
    return terms | {f"{headline}/{group}": terms[headline] for group in groups if headline in terms}


def groups_of(adapter: TaskAdapter, samples: Samples) -> Iterable[Sequence[str]]:
    """The groups of each sample. Where the task has no groups, no sample is made."""
    if type(adapter).groups is TaskAdapter.groups:
        return ((),) * len(samples)
    return map(adapter.groups, samples)


Tasks = TaskAdapter | Mapping[str, TaskAdapter]
"""One task, or several tasks by name, where `Sample.task` of each sample is its task's name."""


def by_name(tasks: Tasks) -> Mapping[str, TaskAdapter]:
    """The tasks by name. A single task gets the empty name, as `Sample.task` is empty outside a run."""
    return {"": tasks} if isinstance(tasks, TaskAdapter) else tasks


def task_name(adapter: TaskAdapter) -> str:
    """The name of an adapter in error messages: `module:Class`."""
    return f"{type(adapter).__module__}:{type(adapter).__qualname__}"


def describe(error: BaseException, task: type[TaskAdapter] = TaskAdapter) -> str:
    """An exception of foreign code as one line, with file and line: those in the task's own file, if it is involved."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    kinds = [kind for kind in task.__mro__ if issubclass(kind, TaskAdapter) and kind is not TaskAdapter]
    own = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    frame = next((f for f in reversed(frames) if f.filename in own), frames[-1] if frames else None)
    return f"{type(error).__name__}: {error}{f' at {frame.filename}:{frame.lineno}' if frame else ''}"
