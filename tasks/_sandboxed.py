"""The two children of `_sandbox`: the worker runs an answer's code, the tester runs the tests. Standard library only.

The worker never sees the tests, and the tester never runs the answer. When a test calls the answer's function, the call
goes through a pipe, and the tester rebuilds the result from plain values. Other objects (an instance of the answer's
own class, an iterator) stay in the worker, and a number stands for them.

Each child first confines itself. The worker then sends ["ready", layers] and waits. The tester forwards this message to
the parent, whose clock starts when it arrives, and sends ["go"].
"""

import ast
import builtins
import collections
import functools
import importlib
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeGuard

from tasks._confine import confine
from tasks._unit_tests import names_needed, parse_tests
from tasks._wire import Line, decode, encode


def work(line: Line, setup: str, code: str, entry_point: str | None) -> None:
    """The worker's work: run the answer's code, then serve the tester's requests until the tester ends."""
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    namespace: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    try:
        if setup:
            exec(compile(setup, "<setup>", "exec"), namespace)
        if entry_point:
            namespace.pop(entry_point, None)  # the setup may hold it as a stub
        exec(compile(code, "<answer>", "exec"), namespace)
    except BaseException as error:
        line.send(["failed", type(error).__name__])
        return
    line.send(["loaded", sorted(name for name in namespace if not name.startswith("__"))])
    while True:
        try:
            what, *arguments = [decode(part, kept.__getitem__) for part in line.receive()]
        except EOFError:
            return
        try:
            result = _perform(namespace, what, arguments)
            reply = ["is", encode(result, keep), encode([a for a in arguments if type(a) in _MUTABLE], keep)]
            json.dumps(reply)
        except BaseException as error:
            names = [base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base]
            reply = ["raises", names[0], str(error)[:1000]]
        line.send(reply)


_MUTABLE = (list, dict, set, bytearray, collections.deque)


def _perform(namespace: dict[str, Any], what: str, arguments: list[Any]) -> Any:
    match what:
        case "name":
            return namespace[arguments[0]]
        case "call":
            called, positional, named = arguments[0], arguments[1], arguments[2]
            arguments[:] = [*positional, *named.values()]  # what the call may change
            return called(*positional, **named)
        case "get":
            return getattr(arguments[0], arguments[1])
        case "set":
            return setattr(arguments[0], arguments[1], arguments[2])
        case "next":
            return next(arguments[0])
        case _:
            operation: Any = {"iter": iter, "len": len, "str": str, "repr": repr, "bool": bool}.get(what)
            return operation(arguments[0]) if operation else getattr(arguments[0], what)(*arguments[1:])


class Remote:
    """A proxy in the tester for an object in the worker. It equals only itself, whatever its class defines."""

    def __init__(self, line: Line, number: int) -> None:
        object.__setattr__(self, "_remote", (line, number))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ask(self._remote[0], "call", self, list(args), kwargs, change=[*args, *kwargs.values()])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._remote[0], "get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self._remote[0], "set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = ask(self._remote[0], "iter", self)
        while True:
            try:
                yield ask(self._remote[0], "next", iterator)
            except StopIteration:
                return

    def __len__(self) -> int:
        return ask(self._remote[0], "len", self)

    def __bool__(self) -> bool:
        return ask(self._remote[0], "bool", self) is True

    def __getitem__(self, key: Any) -> Any:
        return ask(self._remote[0], "__getitem__", self, key)

    def __contains__(self, item: Any) -> bool:
        return any(item == member for member in self)

    def __next__(self) -> Any:
        return ask(self._remote[0], "next", self)

    def __str__(self) -> str:
        return ask(self._remote[0], "str", self)

    def __repr__(self) -> str:
        return ask(self._remote[0], "repr", self)


def ask(line: Line, *request: Any, change: list[Any] | None = None) -> Any:
    """Send a request to the worker and return the result. `change` is updated as the worker changed the arguments."""
    line.send([encode(part, _number_of) for part in request])
    reply = line.receive()
    if reply[0] == "raises":
        kind = getattr(builtins, str(reply[1]), RuntimeError)
        # A StopIteration of the answer's would end the test's own loop, as in all(map(f, ...))
        ends = kind is StopIteration and request[0] != "next"
        raises = isinstance(kind, type) and issubclass(kind, Exception) and not ends
        raise (kind if raises else RuntimeError)(str(reply[2]))  # type: ignore[operator]
    known = lambda number: Remote(line, number)  # noqa: E731
    for mine, theirs in zip([a for a in change or () if type(a) in _MUTABLE], decode(reply[2], known), strict=False):
        if type(mine) is type(theirs) and mine != theirs:
            mine.clear()
            if isinstance(mine, dict | set):
                mine.update(theirs)
            else:
                mine.extend(theirs)
    return decode(reply[1], known)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._remote[1]
    raise TypeError(f"a {type(value).__name__} cannot be handed to the answer's code")


def run_tests(line: Line, say: Callable[[Any], None], tests: str | list[str], setup: str, entry: str | None) -> None:
    """Run the tests; report ["test", number, passed] for each test with a result, and ["end"] after the last.

    A program that breaks off reports no end, and no result of assertions that it might have met again.
    """
    programs = parse_tests(tests)
    verdicts: dict[int, bool] = {}

    def judge(number: int, holds: Callable[[], Any]) -> None:
        verdicts[number] = passes(holds) and verdicts.get(number, True)
        if number not in programs.repeated:
            say(["test", number, verdicts[number]])

    namespace: dict[str, Any] = {"__name__": "tests", "__judge__": judge}
    exec(compile(setup, "<setup>", "exec"), namespace)
    loaded = line.receive()
    if loaded[0] != "loaded":
        return
    theirs = set(loaded[1])
    for name in names_needed(programs.trees, setup):
        if name in sys.stdlib_module_names and name != entry:
            namespace[name] = importlib.import_module(name)
        elif name in theirs:
            namespace[name] = ask(line, "name", name)
    if entry is not None:
        if entry not in theirs:
            return
        namespace[entry] = ask(line, "name", entry)
    is_program = isinstance(tests, str)
    passed = True
    for number, tree in enumerate(programs.trees):
        passed = passes(functools.partial(_run, tree, namespace, is_program, entry))
        if not is_program or "__judge__" not in ast.dump(tree):
            say(["test", number, passed])
    if passed or not is_program:
        for number in programs.repeated & verdicts.keys():
            say(["test", number, verdicts[number]])
        say(["end"])


def _run(tree: ast.Module, namespace: dict[str, Any], is_program: bool, entry: str | None) -> bool:
    exec(compile(tree, "<tests>", "exec"), namespace)
    if is_program:
        _call_tests(namespace, entry)
    return True


def passes(test: Callable[[], Any]) -> bool:
    """Whether a test returns a true value. An exception of the test or of the answer is a failure."""
    unittest = importlib.import_module("unittest")  # here, for the worker needs none
    verdicts: list[bool] = []
    unittest.FunctionTestCase(lambda: verdicts.append(bool(test()))).run(_UNHEARD)
    return verdicts == [True]


_REPORTS = ("startTest", "stopTest", "addSuccess", "addFailure", "addError", "addSkip", "addDuration")
_UNHEARD: Any = types.SimpleNamespace(**dict.fromkeys(_REPORTS, lambda *_: None))
"""A unittest.TestResult that ignores all reports; the default one prints a traceback of every failure."""


def _call_tests(namespace: dict[str, Any], entry: str | None) -> None:
    """Call check(candidate), as HumanEval does, and all test functions that need no arguments, as pytest does."""
    check = namespace.get("check")
    if entry is not None and _takes(check, namespace[entry]):
        check(namespace[entry])
    for name, function in list(namespace.items()):
        if name.startswith("test") and _takes(function):
            function()


def _takes(function: Any, *arguments: Any) -> TypeGuard[Callable[..., Any]]:
    if not isinstance(function, types.FunctionType):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def main() -> None:
    """Run a child. sys.argv holds its role, "work" or "test", and its pipes; the job comes from standard input."""
    job = json.load(sys.stdin)
    read, write, results = (int(part) for part in sys.argv[2:5])
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    sys.set_int_max_str_digits(0)
    is_tester = sys.argv[1] == "test"
    if is_tester:
        importlib.import_module("unittest")  # before the time of the answer runs
    held = confine(job["scratch"], job["memory_mb"], job["file_mb"], job["cpu_s"], job["readable"])
    line = Line(read, write)
    for number in (1, 2):  # up to here the parent keeps what is printed
        os.dup2(nowhere, number)
    os.close(nowhere)
    if is_tester:
        _test(line, os.fdopen(results, "w"), job)
        return
    line.send(["ready", held])
    if line.receive() == ["go"]:
        work(line, job["setup"], job["code"], job["entry_point"])


def _test(line: Line, report: TextIO, job: dict[str, Any]) -> None:
    def say(message: Any) -> None:
        report.write(json.dumps(message) + "\n")
        report.flush()

    try:
        ready = line.receive()
        say(["ready", ready[1]])
        line.send(["go"])
    except (EOFError, BrokenPipeError):
        return  # the worker did not start; the parent has its reason
    run_tests(line, say, job["tests"], job["setup"], job["entry_point"])
