"""Finds a task adapter by its name and builds it with the user's arguments."""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.names import did_you_mean
from vlm_grpo.task.interface import TaskAdapter, describe

TASK_PACKAGE = "tasks"


def find_task(name: str, args: Mapping[str, Any], demo: bool = False) -> TaskAdapter:
    """The adapter called `name`, built with `args`. With `demo`, its `demo_args` fill in arguments that `args` lacks.

    `refcoco` names the only concrete adapter in `tasks/refcoco.py`. `my_pkg.module:Class` names a class, whose module
    is imported from the current directory or from the installed packages.

    Raises: UserError if there is no such adapter, or if it does not accept `args`.
    """
    return bind_task(name, args, demo)()


def bind_task(name: str, args: Mapping[str, Any], demo: bool = False) -> Callable[[], TaskAdapter]:
    """A function that builds the adapter of `find_task`. The class and the names in `args` are checked at once.

    No data is read before the function is called.
    """
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
    """Names of the tasks in the `tasks` package, sorted."""
    package = importlib.import_module(TASK_PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_"))


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
    """The concrete adapters that the module itself defines, imported ones left out."""
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
    """Raise UserError for an argument that the constructor does not take, or for a required one that is missing."""
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
    """Raise UserError for a value whose type contradicts the constructor's annotation. Only plain types are checked."""
    for key, value in args.items():
        annotation = signature.parameters[key].annotation if key in signature.parameters else None
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if not set(kinds) <= set(_PLAIN) or type(value) not in {*_PLAIN, list, dict}:
            continue
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            accepted = " or ".join(_PLAIN[kind] for kind in kinds)
            raise UserError(f"task={name}: task_args.{key} is {value!r}; accepted: {accepted}.")
