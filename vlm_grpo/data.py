"""Which samples a step sees, and what happens to those that cannot be read."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch

from vlm_grpo.errors import UserError
from vlm_grpo.names import nearest
from vlm_grpo.options import Range
from vlm_grpo.prefetch import Prefetch
from vlm_grpo.processes import Processes
from vlm_grpo.prompts import PromptBuilder
from vlm_grpo.rollout import Prompt
from vlm_grpo.task import (
    LazySamples,
    Sample,
    Samples,
    TaskAdapter,
    Tasks,
    bind_task,
    by_name,
    check_samples,
    describe,
    known_tasks,
    task_name,
)


@dataclass
class TaskConfig:
    """The task."""

    ROOM = "task and data"

    # A task of the tasks package, or my_module:MyTask for one of your own; or a list of such tasks, each known by its
    # name in the package or that of its class, or by NAME in NAME=TASK, which tells two of the same class apart
    task: str | list[str] = ""
    # Arguments of the task's constructor; where several tasks are named: by task, as in task_args.NAME.limit=100
    task_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Samples and prompts."""

    ROOM = "task and data"

    # Split that is trained on; where several tasks are named: of all of them, or a list in their order
    train_split: str | list[str] = "train"
    # Use only the first so many samples of the split (of each task's); none: all
    max_samples: Annotated[int | None, Range(at_least=1)] = None
    # A sample whose image cannot be read: stop, or leave it out, count it and say which
    on_bad_sample: Literal["error", "skip"] = "error"
    # A prompt of more than max_prompt_length tokens: stop, or leave it out and count it; it is never cut
    on_long_prompt: Literal["error", "skip"] = "error"
    # Most tokens of a prompt, image tokens included; none: what the model's context leaves for thought and answer
    max_prompt_length: Annotated[int | None, Range(at_least=1)] = None
    # Threads that read the next step's images and questions while this step computes; 0: they are read when they are
    # needed. It changes no number
    dataloader_num_workers: Annotated[int, Range(at_least=0)] = 0


MAX_UNUSED = 256  # samples that a run draws before the first that it can use


@dataclass
class Skipped:
    """Samples that were left out, by reason."""

    bad: int = 0
    long: int = 0
    messages: list[str] = field(default_factory=list)
    first: str = ""  # of all messages

    def add_message(self, message: str) -> None:
        self.first = self.first or message
        self.messages.append(message)

    def take_messages(self) -> list[str]:
        """Which samples and why, since the last call."""
        taken, self.messages = self.messages, []
        return taken


def skip_counts(skipped: Skipped, processes: Processes) -> dict[str, float]:
    """How many samples were left out so far, over all processes."""
    every = processes.gather([(skipped.bad, skipped.long)])
    return {
        "skipped_bad_samples": float(sum(bad for bad, _ in every)),
        "skipped_long_prompts": float(sum(long for _, long in every)),
    }


def check_used(skipped: Skipped, metrics: Mapping[str, float], num_drawn: int, total: int, is_last: bool) -> None:
    """Raise UserError if none of a run's `num_drawn` samples could be used, and these are all of `total`, or enough to
    tell, or the run ends here. `metrics` hold the `skip_counts`.
    """
    bad, long = metrics["skipped_bad_samples"], metrics["skipped_long_prompts"]
    if bad + long < num_drawn or not (is_last or num_drawn >= min(total, MAX_UNUSED)):
        return
    counts = {"on_bad_sample=skip": bad, "on_long_prompt=skip": long}
    said = " and ".join(f"{option} left out {count:.0f}" for option, count in counts.items() if count)
    hint = "; raise max_prompt_length or lower max_pixels" if long else ""
    raise UserError(f"no sample could be used, so nothing is learnt: {said}. The first: {skipped.first}{hint}")


class PromptReader:
    """Samples to prompts, with the user's choice about samples that are bad or too long. Use as a context manager, or
    call `close`, where there are workers.
    """

    def __init__(self, prompts: PromptBuilder, tasks: Tasks, config: DataConfig, max_prompt_length: int) -> None:
        self.tasks, self.config = by_name(tasks), config
        self.limit = max_prompt_length
        self.skipped = Skipped()
        coordinates = {name: task.coordinates for name, task in self.tasks.items()}
        self._prefetch = Prefetch(prompts, partial(_read_prompt, coordinates), config.dataloader_num_workers)

    def expect(self, samples: Iterable[Sample]) -> None:
        """These very samples will be read next, in this order: workers may begin. What is wrong with one of them is
        said, and counted, when it is read.
        """
        self._prefetch.begin(samples)

    def read(self, samples: Sequence[Sample]) -> list[Prompt]:
        """The prompts of the samples that can be used, in order; a skipped one is never replaced by another.

        Raises: UserError, naming the sample, for one that cannot be used and may not be skipped.
        """
        prompts = [self._accept(sample, self._prefetch.take(sample)) for sample in samples]
        return [prompt for prompt in prompts if prompt is not None]

    def read_batches(self, batches: Iterable[Sequence[Sample]]) -> Iterator[list[Prompt]]:
        """The prompts of one batch after the other, those of the next being read while these are used."""
        if self.config.dataloader_num_workers == 0:
            yield from map(self.read, batches)
            return
        expected: deque[Sequence[Sample]] = deque()
        for samples in batches:
            self.expect(samples)
            expected.append(samples)
            if len(expected) > 1:
                yield self.read(expected.popleft())
        yield from map(self.read, expected)

    def close(self) -> None:
        """End the workers."""
        self._prefetch.close()

    def __enter__(self) -> "PromptReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, sample: Sample, prompt: Prompt | UserError) -> Prompt | None:
        if isinstance(prompt, UserError):
            if self.config.on_bad_sample == "error":
                raise prompt
            self.skipped.bad += 1
            self.skipped.add_message(str(prompt))
            return None
        if len(prompt.ids) <= self.limit:
            return prompt
        message = f"sample {sample.id!r}: the prompt has {len(prompt.ids)} tokens, more than {self.limit}"
        if self.config.on_long_prompt == "error":
            raise UserError(f"{message}; raise max_prompt_length, lower max_pixels, or set on_long_prompt=skip")
        self.skipped.long += 1
        self.skipped.add_message(message)
        return None


def _read_prompt(coordinates: Mapping[str, bool], prompts: PromptBuilder, sample: Sample) -> Prompt | UserError:
    """The prompt, or what is wrong with the sample. `coordinates`: which tasks have them."""
    try:
        return prompts.build(sample, coordinates[sample.task])
    except UserError as error:
        return error


def task_names(config: TaskConfig) -> dict[str, str]:
    """The tasks that the options name, each under the name by which options and metrics speak of it.

    >>> task_names(TaskConfig(task=["gsm8k", "my_lab.tasks:Knots", "plus=refcoco"]))
    {'gsm8k': 'gsm8k', 'Knots': 'my_lab.tasks:Knots', 'plus': 'refcoco'}
    """
    entries = [config.task] if isinstance(config.task, str) else list(config.task)
    if not entries or not all(entries):
        raise UserError(f"task: name one of {', '.join(known_tasks())}, or my_module:MyTask for one of your own")
    names: dict[str, str] = {}
    for entry in entries:
        if "," in entry:
            raise UserError(f"task={entry}: several tasks are a list: task=[{entry}]")
        given, equals, task = entry.rpartition("=")
        name = given if equals else task.rpartition(":")[2]
        if (equals or len(entries) > 1) and not re.fullmatch(r"[\w+-]+", name):
            raise UserError(f"task={entry}: {name!r} is no name of a task; accepted: letters, digits, _, + and -")
        if name in names:
            raise UserError(f"task: two tasks are called {name!r}; tell them apart as in task=[first={task},{task}]")
        names[name] = task
    return names


def bind_tasks(config: TaskConfig, demo: bool) -> dict[str, Callable[[], TaskAdapter]]:
    """What builds the adapter of each task that the options name; no data is read yet. As `tasks_of` in all else."""
    names = task_names(config)
    if len(names) == 1:
        return {name: bind_task(task, config.task_args, demo) for name, task in names.items()}
    for key, value in config.task_args.items():
        if key not in names:
            near = nearest(key, names)
            hint = f" Did you mean task_args.{near}?" if near else f" Write task_args.{next(iter(names))}.{key}=…"
            raise UserError(f"task_args.{key}: which of the tasks {', '.join(names)} is meant?{hint}")
        if not isinstance(value, Mapping):
            raise UserError(
                f"task_args.{key} is {value!r}; it must hold arguments of task {key}: task_args.{key}.NAME=…"
            )
    found = {}
    for name, task in names.items():
        with _one_of_several(name):
            found[name] = bind_task(task, config.task_args.get(name, {}), demo)
    return found


def tasks_of(config: TaskConfig, demo: bool) -> dict[str, TaskAdapter]:
    """The adapters that the options name, by name and in their order, each with its own arguments.

    `demo`: the shipped model brings the tasks' own demonstration arguments. One task has its arguments in `task_args`
    itself, several have theirs below their names. Raises: UserError for arguments that belong to none of them.
    """
    adapters = {}
    bound = bind_tasks(config, demo)
    for name, build in bound.items():
        with _one_of_several(name) if len(bound) > 1 else nullcontext():
            adapters[name] = build()
    return adapters


@contextmanager
def _one_of_several(name: str) -> Iterator[None]:
    """Inside, an error speaks of a task that is alone; its arguments are called as they are among several."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("task_args.", f"task_args.{name}.")) from error


def tasks_title(config: TaskConfig) -> str:
    """The names of the tasks as one word, for messages and folders."""
    return "+".join(task.replace(":", "-") for task in task_names(config).values())


def split_samples(adapter: TaskAdapter, split: str, limit: int | None) -> Samples:
    """The split's samples, at most `limit`, checked: there are some and their ids differ."""
    try:
        samples = adapter.samples(split)
        check_samples(samples, split)
        if limit is None or limit >= len(samples):
            return samples
        return samples[:limit] if isinstance(samples, LazySamples) else [samples[i] for i in range(limit)]
    except UserError:
        raise
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        described = describe(error, type(adapter))
        raise UserError(f"task {task_name(adapter)}: samples({split!r}) raised {described}") from error


def epoch_indices(total: int, first: int, count: int, seed: int) -> list[int]:
    """Indices of `count` draws after the first `first`: epochs are shuffled anew, draws run on across their borders.

    A function of its arguments alone, so that a resumed run goes on with the very next prompt.

    >>> sorted(epoch_indices(4, 0, 2, seed=0) + epoch_indices(4, 2, 2, seed=0))
    [0, 1, 2, 3]
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(first + len(indices), total)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        indices.extend(order[offset : offset + count - len(indices)].tolist())
    return indices
