"""Which tasks, splits and samples the options name."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.names import nearest
from vlm_grpo.task.check import check_samples
from vlm_grpo.task.find import bind_task, known_tasks
from vlm_grpo.task.interface import LazySamples, Samples, TaskAdapter, describe, task_name


@dataclass
class TaskConfig:
    """The task."""

    ROOM = "task and data"

    # A task of the tasks package, or my_module:MyTask for one of your own; or a list of such tasks, each known by its
    # name in the package or that of its class, or by NAME in NAME=TASK, which tells two of the same class apart
    task: str | list[str] = ""
    # Arguments of the task's constructor; where several tasks are named: by task, as in task_args.NAME.limit=100
    task_args: dict[str, Any] = field(default_factory=dict)


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
