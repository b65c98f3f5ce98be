"""Samples, rewards and the adapter that a task is: everything a user of the package writes against."""

import importlib
import inspect
import math
import os
import pkgutil
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, overload

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.images import open_image
from vlm_grpo.names import did_you_mean

TASK_PACKAGE = "tasks"

JUNK_ANSWERS = (
    "",
    " \n\t",
    "I cannot tell.",
    "[",
    "]]})",
    "[nan, nan, inf, -inf]",
    "<answer></answer>",
    '{"answer": null}',
    "\x00\ud800 \N{ZERO WIDTH SPACE}\N{PILE OF POO}",
    "((((" * 500,
)


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


def find_task(name: str, args: Mapping[str, Any], demo: bool = False) -> TaskAdapter:
    """The adapter called `name`, built with `args`; with `demo` on top of the adapter's `demo_args`.

    `refcoco` is the one concrete adapter of `tasks/refcoco.py`; `my_pkg.module:Class` is that class, imported from the
    current directory or from anything installed.
    """
    return bind_task(name, args, demo)()


def bind_task(name: str, args: Mapping[str, Any], demo: bool = False) -> Callable[[], TaskAdapter]:
    """What builds the adapter of `find_task`: its class is found and takes these arguments; no data is read yet."""
    module_name, colon, class_name = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        stem = Path(module_name).name.removesuffix(".py")
        raise UserError(
            f"task={name}: name the module, not its file: task={stem}:{class_name or 'MyTask'}, started in the folder "
            f"where {stem}.py lies"
        )
    if colon:
        adapter_class = _named_class(_import_user_module(name, module_name), class_name, name)
    else:
        adapter_class = _only_adapter(_import_known_task(name))
    args = {**adapter_class.demo_args, **args} if demo else args
    signature = inspect.signature(adapter_class)
    _check_names(signature, name, args)
    return partial(_build, adapter_class, signature, name, args)


def known_tasks() -> list[str]:
    """Names of the tasks in the tasks package."""
    package = importlib.import_module(TASK_PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


def task_name(adapter: TaskAdapter) -> str:
    """The name of an adapter in messages."""
    return f"{type(adapter).__module__}:{type(adapter).__qualname__}"


def score(adapter: TaskAdapter, sample: Sample, answer: str) -> Reward | None:
    """The adapter's reward, checked; None where the adapter has no finite reward for this answer.

    Raises UserError, naming task and sample, if the adapter crashes or returns something that is no reward.
    """
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    try:
        reward = adapter.reward(sample, answer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(
            f"{where}: reward() raised {describe(error, type(adapter))} for the answer {_short(answer)}. "
            "reward() must give a Reward for any text."
        ) from error
    if reward is None:
        return None
    if not isinstance(reward, Reward):
        raise UserError(f"{where}: reward() returned {_short(reward)}; return Reward(value=...) or None.")
    value = _number(reward.value, f"{where}: Reward.value")
    if not math.isfinite(value):
        return None
    if not isinstance(reward.parts, Mapping):
        raise UserError(f"{where}: Reward.parts is {_short(reward.parts)}; it must map names to numbers.")
    parts = {part: _number(number, f"{where}: Reward.parts[{part!r}]") for part, number in reward.parts.items()}
    return Reward(value, parts)


def check_samples(samples: Samples, split: str) -> None:
    """Raises UserError if the split is empty or two samples share an id. Opens no image."""
    if len(samples) == 0:
        raise UserError(f"split {split!r} is empty: there is nothing to work on. Check task_args and the data files.")
    first_at: dict[str, int] = {}
    for index, sample_id in enumerate(samples.ids if isinstance(samples, LazySamples) else map(_id, samples)):
        if not isinstance(sample_id, str):
            raise UserError(f"split {split!r}: item {index} has the id {sample_id!r}; ids are text.")
        if sample_id in first_at:
            raise UserError(
                f"split {split!r}: the id {sample_id!r} stands at items {first_at[sample_id]} and {index}. "
                "Ids must be unique, since rollouts and predictions are recorded under them."
            )
        first_at[sample_id] = index


def check_task(adapter: TaskAdapter, split: str = "train", limit: int = 64) -> None:
    """Prints a line on what was checked, or raises UserError at the first thing that would spoil training on this task.

    All ids of the split must differ. For the first `limit` samples, the images must open, the reference answer must
    score full marks, and junk must score less than half of them, a number or None, without raising. At the end the
    metrics of the reference answers are computed, and must hold the headline.
    """
    samples = adapter.samples(split)
    check_samples(samples, split)
    checked = [samples[index] for index in range(min(limit, len(samples)))]
    answers: list[str] = []
    rewards: list[Reward] = []
    for sample in checked:
        _check_images(adapter, sample)
        answers.append(adapter.reference_answer(sample))
        rewards.append(_check_marks(adapter, sample, answers[-1]))
    metrics = adapter.metrics(checked, answers, rewards)
    if adapter.headline not in metrics and not any(adapter.headline in reward.parts for reward in rewards):
        raise UserError(
            f"task {task_name(adapter)}: headline is {adapter.headline!r}, but the metrics are {sorted(metrics)}."
        )
    print(
        f"task {task_name(adapter)}: {len(samples)} samples of {split!r} with ids of their own; of the first "
        f"{len(checked)} the images open, the reference answers score full marks, and junk scores little"
    )


def _id(sample: Sample) -> str:
    if not isinstance(sample, Sample):
        raise UserError(f"samples() holds {_short(sample)}; it must give Sample objects.")
    return sample.id


def _check_images(adapter: TaskAdapter, sample: Sample) -> None:
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    if isinstance(sample.images, str) or not isinstance(sample.images, Sequence):
        raise UserError(f"{where}: images is {_short(sample.images)}; it must be a list of paths or images.")
    if adapter.coordinates and len(sample.images) != 1:
        raise UserError(
            f"{where}: has {len(sample.images)} images; a task with coordinates=True has exactly one image per sample, "
            "the one whose pixels are meant."
        )
    for image in sample.images:
        open_image(image, f"{where}: the image {image}")


def _check_marks(adapter: TaskAdapter, sample: Sample, reference: str) -> Reward:
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    if not isinstance(reference, str):
        raise UserError(f"{where}: reference_answer() returned {_short(reference)}; it must be text.")
    gold = score(adapter, sample, reference)
    if gold is None or abs(gold.value - adapter.full_marks) > 1e-3 * max(1.0, abs(adapter.full_marks)):
        got = "no reward" if gold is None else f"{gold.value:g}"
        raise UserError(
            f"{where}: the reference answer {_short(reference)} scores {got} where full marks are "
            f"{adapter.full_marks:g}. Correct reward() or reference_answer(), or set full_marks."
        )
    for junk in JUNK_ANSWERS:
        reward = score(adapter, sample, junk)
        if reward is None and adapter.reward(sample, junk) is not None:
            raise UserError(
                f"{where}: the reward of the junk answer {_short(junk)} is no finite number; give one, or None for an "
                "answer that cannot be judged."
            )
        if reward is not None and reward.value >= adapter.full_marks / 2:
            raise UserError(
                f"{where}: the junk answer {_short(junk)} scores {reward.value:g}; reward() is too generous."
            )
    return gold


def _import_known_task(name: str) -> ModuleType:
    package = importlib.import_module(TASK_PACKAGE)
    tasks = known_tasks()
    if name not in tasks:
        hint = did_you_mean(name, tasks)
        raise UserError(
            f"unknown task {name!r}.{hint} Known tasks: {', '.join(tasks)} (files in {', '.join(package.__path__)}). "
            "A task of your own is task=my_module:MyTask, with my_module.py in the current directory."
        )
    return _import(f"{TASK_PACKAGE}.{name}", name)


def _import_user_module(name: str, module_name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    return _import(module_name, name)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"task={name}: importing {module_name} failed: it needs {error.name}.") from error
        raise UserError(
            f"task={name}: there is no module {error.name!r}. Looked in the current directory {os.getcwd()} and in "
            f"the installed packages. Known tasks: {', '.join(known_tasks())}."
        ) from error
    except Exception as error:  # a task file is foreign code: whatever it raises becomes one message
        raise UserError(f"task={name}: importing {module_name!r} failed with {describe(error)}.") from error


def _adapters_of(module: ModuleType) -> list[type[TaskAdapter]]:
    """Concrete adapters that the module itself defines."""
    return [
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and issubclass(member, TaskAdapter)
        and not inspect.isabstract(member)
        and member.__module__ == module.__name__
    ]


def _only_adapter(module: ModuleType) -> type[TaskAdapter]:
    adapters = _adapters_of(module)
    if len(adapters) != 1:
        names = ", ".join(adapter.__name__ for adapter in adapters) or "none"
        raise UserError(
            f"{module.__file__} must define exactly one concrete TaskAdapter; it defines {names}. "
            f"Name the one you mean: task={module.__name__}:ClassName."
        )
    return adapters[0]


def _named_class(module: ModuleType, class_name: str, name: str) -> type[TaskAdapter]:
    adapter_class = getattr(module, class_name, None)
    if not (inspect.isclass(adapter_class) and issubclass(adapter_class, TaskAdapter)):
        names = ", ".join(adapter.__name__ for adapter in _adapters_of(module)) or "none"
        raise UserError(
            f"task={name}: {module.__file__} has no TaskAdapter called {class_name!r}; the adapters in it: {names}."
        )
    if inspect.isabstract(adapter_class):
        missing = ", ".join(sorted(adapter_class.__abstractmethods__))
        raise UserError(f"task={name}: {class_name} does not define {missing}.")
    return adapter_class


def _check_names(signature: inspect.Signature, name: str, args: Mapping[str, Any]) -> None:
    """Raises UserError for arguments that the constructor does not take, and for those it lacks."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key in args:
        if key not in signature.parameters and not takes_any:
            hint = did_you_mean(key, signature.parameters)
            accepted = ", ".join(signature.parameters) or "none"
            raise UserError(f"task={name}: unknown argument task_args.{key}.{hint} Accepted: {accepted}.")
    try:
        signature.bind(**args)
    except TypeError as error:
        raise UserError(f"task={name}: {error} (set it with task_args.NAME=VALUE).") from error


def _build(
    adapter_class: type[TaskAdapter], signature: inspect.Signature, name: str, args: Mapping[str, Any]
) -> TaskAdapter:
    try:
        adapter = adapter_class(**args)
    except UserError:
        raise
    except Exception as error:  # a constructor is foreign code: whatever it raises becomes one message
        _check_types(signature, name, args)
        raise UserError(
            f"task={name}: building it with {dict(args)} failed with {describe(error, adapter_class)}."
        ) from error
    _check_types(signature, name, args)
    return adapter


_PLAIN: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "nothing (null)",
}


def _check_types(signature: inspect.Signature, name: str, args: Mapping[str, Any]) -> None:
    """Raises UserError for a value that is of none of the plain types by which the constructor annotates it."""
    for key, value in args.items():
        annotation = signature.parameters[key].annotation if key in signature.parameters else None
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if not set(kinds) <= set(_PLAIN) or type(value) not in {*_PLAIN, list, dict}:
            continue
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            accepted = " or ".join(_PLAIN[kind] for kind in kinds)
            raise UserError(f"task={name}: task_args.{key} is {value!r}; accepted: {accepted}.")


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{what} is {_short(value)}; it must be a number (write float(...)).")
    return float(value)


def describe(error: BaseException, task: type[TaskAdapter] = TaskAdapter) -> str:
    """What foreign code raised, and where: in the task's own file, if the error came through it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    kinds = [kind for kind in task.__mro__ if issubclass(kind, TaskAdapter) and kind is not TaskAdapter]
    own = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    frame = next((f for f in reversed(frames) if f.filename in own), frames[-1] if frames else None)
    return f"{type(error).__name__}: {error}{f' at {frame.filename}:{frame.lineno}' if frame else ''}"


def _short(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if isinstance(value, str) or value is None else f"{text} ({type(value).__name__})"
