"""The two children of `_sandbox`: one runs an answer's code, the other the tests that call it. Standard library only.

They are started as plain scripts. The worker never sees the tests, the tester never runs the answer: a test's call of
the answer's function goes through a pipe, and only plain values come back, rebuilt by the tester. What is no plain
value (an instance of the answer's own class, an iterator) stays with the worker and is named by a number.
"""

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

PLAIN = (type(None), bool, str)
MOST_BYTES = 8 << 20  # of one message


# ---- values as JSON ----


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON. Subclasses become their plain base, whatever they redefine; `keep` numbers all the rest."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, int):
        return ["i", hex(int.__int__(value))]
    if isinstance(value, float):
        return ["f", float.hex(float.__float__(value))]
    if isinstance(value, str):
        return str.__str__(value)
    base: Any
    for name, base in (("l", list), ("t", tuple), ("s", set), ("z", frozenset), ("q", collections.deque)):
        if isinstance(value, base):
            return [name, [encode(item, keep) for item in base.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(key, keep), encode(item, keep)] for key, item in dict.items(value)]]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "a", bytes(value).hex()]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind is range:
        return ["r", hex(value.start), hex(value.stop), hex(value.step)]
    if kind is fractions.Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    if kind is decimal.Decimal:
        return ["D", str(value)]
    if kind is datetime.timedelta:
        return ["m", value.days, value.seconds, value.microseconds]
    if kind in (datetime.date, datetime.datetime, datetime.time):
        return ["T", kind.__name__, value.isoformat()]
    return ["h", keep(value)]


def decode(data: Any, kept: Callable[[int], Any]) -> Any:
    """The value of `encode`'s JSON; `kept` gives what has a number. Raises anything on other data."""
    if type(data) in PLAIN:
        return data
    name, *rest = data
    match name:
        case "i":
            return int(rest[0], 16)
        case "f":
            return float.fromhex(rest[0])
        case "l" | "t" | "s" | "z" | "q":
            base = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}[name]
            return base([decode(item, kept) for item in rest[0]])
        case "d":
            return {decode(key, kept): decode(item, kept) for key, item in rest[0]}
        case "b" | "a":
            return (bytes if name == "b" else bytearray).fromhex(rest[0])
        case "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "r":
            return range(*(int(part, 16) for part in rest))
        case "F":
            return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
        case "D":
            return decimal.Decimal(rest[0])
        case "m":
            return datetime.timedelta(*(int(part) for part in rest))
        case "T":
            return {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}[rest[0]].fromisoformat(
                rest[1]
            )
        case "h":
            return kept(int(rest[0]))
    raise ValueError(f"no value: {name!r}")


class Line:
    """JSON messages, one a line, over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")

    def send(self, message: Any) -> None:
        self._write.write(json.dumps(message).encode() + b"\n")
        self._write.flush()

    def receive(self) -> Any:
        line = self._read.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone, or says too much")
        return json.loads(line)


# ---- the worker ----


def work(line: Line, setup: str, code: str, entry_point: str | None) -> None:
    """Runs the answer's code, then performs what the tester asks for, until it is gone."""
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


# ---- the tester ----


class Remote:
    """Something that the worker holds. It equals only itself, whatever its class says there."""

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
    """The worker's answer to a request; what it changed in mutable arguments is changed in `change`, too."""
    line.send([encode(part, _number_of) for part in request])
    reply = line.receive()
    if reply[0] == "raises":
        kind = getattr(builtins, str(reply[1]), RuntimeError)
        raises = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if raises else RuntimeError)(str(reply[2]))  # type: ignore[operator]
    known = lambda number: Remote(line, number)  # noqa: E731
    for mine, theirs in zip([a for a in change or () if type(a) in _MUTABLE], decode(reply[2], known), strict=False):
        if type(mine) is type(theirs) and mine != theirs:
            mine.clear()
            mine.extend(theirs) if hasattr(mine, "extend") else mine.update(theirs)
    return decode(reply[1], known)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return value._remote[1]
    raise TypeError(f"a {type(value).__name__} cannot be handed to the answer's code")


class _Asserts(ast.NodeTransformer):
    """Numbers the assertions of a test, and lets it go on after one that fails. `assert True` is no test."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return ast.copy_location(ast.Pass(), node)
        judged = ast.parse(f"__judge__({self.count}, lambda: 0)", mode="exec").body[0]
        assert isinstance(judged, ast.Expr) and isinstance(judged.value, ast.Call)
        lazy = judged.value.args[1]
        assert isinstance(lazy, ast.Lambda)
        lazy.body = node.test
        self.count += 1
        return ast.fix_missing_locations(ast.copy_location(judged, node))


def parse_tests(tests: str | list[str]) -> tuple[list[ast.Module], int]:
    """The test programs, and how many results they have: one each, or one per assertion of a single program."""
    if not isinstance(tests, str):
        return [ast.parse(test) for test in tests], len(tests)
    asserts = _Asserts()
    tree = asserts.visit(ast.parse(tests))
    return [tree], max(asserts.count, 1)


def names_needed(trees: list[ast.Module], setup: str) -> list[str]:
    """Names that the tests use, and neither they nor their setup nor Python define."""
    nodes = [node for tree in [*trees, ast.parse(setup)] for node in ast.walk(tree)]
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    defined |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return sorted(used - defined - set(dir(builtins)) - {"__judge__"})


def run_tests(line: Line, say: Callable[[Any], None], tests: str | list[str], setup: str, entry: str | None) -> None:
    """Says ["test", number, passed] for each test that comes to a result."""
    trees, _ = parse_tests(tests)
    failed: set[int] = set()

    def judge(number: int, holds: Callable[[], Any]) -> None:
        if not passes(holds):
            failed.add(number)
        say(["test", number, number not in failed])

    namespace: dict[str, Any] = {"__name__": "tests", "__judge__": judge}
    exec(compile(setup, "<setup>", "exec"), namespace)
    loaded = line.receive()
    if loaded[0] != "loaded":
        return
    theirs = set(loaded[1])
    for name in names_needed(trees, setup):
        if name in sys.stdlib_module_names and name != entry:
            namespace[name] = importlib.import_module(name)
        elif name in theirs:
            namespace[name] = ask(line, "name", name)
    if entry is not None:
        if entry not in theirs:
            return
        namespace[entry] = ask(line, "name", entry)
    is_program = isinstance(tests, str)
    for number, tree in enumerate(trees):
        passed = passes(functools.partial(_run, tree, namespace, is_program, entry))
        if not is_program or "__judge__" not in ast.dump(tree):
            say(["test", number, passed])


def _run(tree: ast.Module, namespace: dict[str, Any], is_program: bool, entry: str | None) -> bool:
    exec(compile(tree, "<tests>", "exec"), namespace)
    if is_program:
        _call_tests(namespace, entry)
    return True


def passes(test: Callable[[], Any]) -> bool:
    """Whether a test comes to something true. unittest takes for a failure what it or the answer raises."""
    unittest = importlib.import_module("unittest")  # here, for the worker needs none
    verdicts: list[bool] = []
    unittest.FunctionTestCase(lambda: verdicts.append(bool(test()))).run(_UNHEARD)
    return verdicts == [True]


_REPORTS = ("startTest", "stopTest", "addSuccess", "addFailure", "addError", "addSkip", "addDuration")
_UNHEARD: Any = types.SimpleNamespace(**dict.fromkeys(_REPORTS, lambda *_: None))
"""A unittest.TestResult that hears nothing: its own would print a traceback of every failure."""


def _call_tests(namespace: dict[str, Any], entry: str | None) -> None:
    """Calls HumanEval's check(candidate), and test functions as pytest would."""
    if entry is not None and isinstance(namespace.get("check"), types.FunctionType):
        namespace["check"](namespace[entry])
    for name, function in list(namespace.items()):
        if name.startswith("test") and isinstance(function, types.FunctionType):
            function()


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    confine = importlib.import_module("_confine").confine
    del sys.path[0]
    job = json.load(sys.stdin)
    read, write, results = (int(part) for part in sys.argv[2:5])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    sys.set_int_max_str_digits(0)
    held = confine(job["scratch"], job["memory_mb"], job["file_mb"], job["cpu_s"], job["readable"])
    line = Line(read, write)
    if sys.argv[1] == "work":
        line.send(["ready", held])
        work(line, job["setup"], job["code"], job["entry_point"])
        return
    report = os.fdopen(results, "w")

    def say(message: Any) -> None:
        report.write(json.dumps(message) + "\n")
        report.flush()

    try:
        ready = line.receive()
    except EOFError:
        return
    say(["ready", ready[1]])
    run_tests(line, say, job["tests"], job["setup"], job["entry_point"])


if __name__ == "__main__":
    main()
