"""Runs the code of an answer against tests, in two children that can do nothing else."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks._sandboxed import parse_tests
from vlm_grpo.errors import UserError

_CHILD = Path(__file__).with_name("_sandboxed.py")
MOST_REPORT = 1 << 20  # bytes of results


@dataclass(frozen=True)
class Limits:
    """What one answer may use: seconds on the clock for all its tests together, MiB of memory, MiB of files."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    file_mb: int = 1


@dataclass(frozen=True)
class Outcome:
    """Which tests passed, in order, and the layers of the sandbox that held around the answer's code."""

    passed: tuple[bool, ...]
    layers: tuple[str, ...]


def run_answer(
    code: str, tests: str | Sequence[str], setup: str = "", entry_point: str | None = None, limits: Limits | None = None
) -> Outcome:
    """The tests that pass with `code`. `setup` runs before the code and before the tests, each with its own copy.

    `tests` are programs of which each passes or fails; or one program whose assertions count one by one, in which
    `check(candidate)` and functions called test… are called. Tests not reached within the time fail.

    Raises: UserError where the tests are no Python, or the children cannot be started.
    """
    limits = limits or Limits()
    tests = tests if isinstance(tests, str) else list(tests)
    try:
        count = parse_tests(tests)[1]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"the tests are no Python: {error}") from error
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True))
        job = {
            "setup": setup,
            "entry_point": entry_point,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "cpu_s": int(limits.timeout_s) + 2,
            "readable": [sys.base_prefix, "/usr", "/lib", "/lib64", str(_CHILD.with_name("_confine.py"))],
        }
        lines = _run_children(
            stack, {**job, "code": code, "scratch": scratch}, {**job, "tests": tests, "scratch": None}, limits.timeout_s
        )
    if not lines or lines[0][0] != "ready":
        raise UserError("the sandbox did not start; python -m tasks._sandbox says why")
    results: dict[int, bool] = {number: passed for _, number, passed in lines[1:]}
    return Outcome(tuple(results.get(number, False) for number in range(count)), tuple(lines[0][1]))


def _run_children(stack: ExitStack, work: dict[str, Any], test: dict[str, Any], timeout_s: float) -> list[Any]:
    """Starts worker and tester, joined by pipes, and returns what the tester reported until the deadline."""
    to_worker, to_tester, report = os.pipe(), os.pipe(), os.pipe()
    stack.callback(os.close, report[0])
    with ExitStack() as theirs:  # a pipe ends when the child at its other end does, and we hold no end
        for end in (*to_worker, *to_tester, report[1]):
            theirs.callback(os.close, end)
        _start(stack, work, "work", (to_worker[0], to_tester[1], -1))
        _start(stack, test, "test", (to_tester[0], to_worker[1], report[1]))
    return _read_report(report[0], time.monotonic() + timeout_s)


def _start(stack: ExitStack, job: dict[str, Any], role: str, pipes: tuple[int, int, int]) -> None:
    """A child in a session of its own, killed when the stack unwinds. Its job comes by a file that has no name."""
    given = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    given.write(json.dumps(job).encode())
    given.seek(0)
    process = subprocess.Popen(
        # Like -I, and with a hash seed, so that an answer earns the same whenever it is run
        [sys.executable, "-P", "-s", "-S", "-X", "utf8", str(_CHILD), role, *map(str, pipes)],
        stdin=given,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0"},
        cwd="/",
        pass_fds=[pipe for pipe in pipes if pipe >= 0],
        start_new_session=True,
    )
    stack.callback(_end, process)


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_report(report: int, deadline: float) -> list[Any]:
    """The tester's lines until it ends or its time is over; a line that is not whole does not count."""
    content = b""
    while (left := deadline - time.monotonic()) > 0 and len(content) < MOST_REPORT:
        if select.select([report], [], [], left)[0]:
            more = os.read(report, 1 << 16)
            if not more:
                break
            content += more
    return [json.loads(line) for line in content.split(b"\n")[:-1]]
