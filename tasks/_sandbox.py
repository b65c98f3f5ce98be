"""Runs an answer's code against tests, in two confined child processes. Linux only.

    python -m tasks._sandbox

runs a small exercise on this machine and prints which layers of protection hold and which are missing.

What an answer cannot do. It earns nothing by printing, by `os._exit(0)`, by patching builtins, by objects that equal
everything or by reading the tests: the tests run in the other child, which receives only plain values. By default an
answer has 5 s from the moment both children are ready and 512 MiB of memory for each child. It does not get the
parent's environment variables.

The layers, each skipped if the kernel refuses it:

    namespaces        no network, no mounts and no System V memory of others
    read-only mounts  from Linux 5.12
    small scratch     a writable folder of 1 MiB, in memory; without this layer there is no writable folder
    limits            memory, processor time, sizes of files; no capabilities, even for root
    landlock          from Linux 5.13: only Python's and the system's libraries can be read, and nothing written
    seccomp           x86-64 and arm64: no sockets, processes, signals, owners, modes, times of files
    hook              an audit hook in Python, against ordinary calls

What the sandbox does not prevent. Without landlock, the answer can read what the user may read; without landlock and
read-only mounts, it can write there; without seccomp it can start processes, and without namespaces as well it can
reach the network. In these cases only the hook remains, and malicious code gets around it. Containers often forbid
namespaces. Without read-only mounts and before Linux 6.2, code can empty library files that the user may write. Even
with every layer, an answer can find out that a file exists, with its size and time; start as many threads as fit into
its memory, about 1,200 in 512 MiB; keep a core busy until its time is over; and exploit bugs of the kernel. It can keep
or change the objects that a test passes to it, and can return the memorised results of tests that it was shown. If that
is too much, run foreign code in a virtual machine.
"""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tasks._unit_tests import parse_tests
from vlm_grpo.common.errors import UserError

LAYERS = ("namespaces", "read-only mounts", "small scratch", "limits", "landlock", "seccomp", "hook")
START_TIMEOUT_S = 60.0  # for two interpreters to start, on a machine that may be busy
MOST_REPORT = 1 << 20  # bytes of results
_START = f"""import sys
sys.path.append({str(Path(__file__).parent.parent)!r})  # last: it may be site-packages
from tasks._sandboxed import main
sys.path.pop()
main()"""


@dataclass(frozen=True)
class Limits:
    """The limits of one answer: wall-clock seconds for all its tests together, MiB of memory, MiB of files."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    file_mb: int = 1


@dataclass(frozen=True)
class Outcome:
    """Which tests passed, in order, and the layers of the sandbox that held for the answer's code."""

    passed: tuple[bool, ...]
    layers: tuple[str, ...]


def run_answer(
    code: str, tests: str | Sequence[str], setup: str = "", entry_point: str | None = None, limits: Limits | None = None
) -> Outcome:
    """Run `tests` against `code`. `setup` runs twice: before the code, and before the tests in the other child.

    `tests` is a list of programs, each of which passes or fails, or one program whose assertions count separately. In a
    single program, `check(candidate)` and functions named test… without required arguments are called. Tests that are
    not reached in time fail. If all assertions of a program hold but it raises or hangs, one failure is added.

    Raises: UserError if the tests are not valid Python, or if the children cannot be started.
    """
    if sys.platform != "linux":
        raise UserError(f"task=code runs answers in a sandbox that needs Linux; this is {sys.platform}")
    limits = limits or Limits()
    tests = tests if isinstance(tests, str) else list(tests)
    try:
        count = parse_tests(tests).count
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"the tests are no Python: {error}") from error
    job = {
        "setup": setup,
        "entry_point": entry_point,
        "memory_mb": limits.memory_mb,
        "file_mb": limits.file_mb,
        "cpu_s": int(limits.timeout_s) + 2,
        "readable": _readable(),
    }
    lines = _run_children({**job, "code": code}, {**job, "tests": tests}, limits.timeout_s)
    results: dict[int, bool] = {line[1]: line[2] for line in lines[1:] if line[0] == "test"}
    passed = [results.get(number, False) for number in range(count)]
    if isinstance(tests, str) and all(passed) and lines[-1] != ["end"]:
        passed.append(False)
    return Outcome(tuple(passed), tuple(lines[0][1]))


@functools.cache
def missing_layers() -> tuple[str, ...]:
    """The layers that this machine lacks, found by running a small answer that imports one of Python's modules.

    Raises: UserError if that answer does not pass its test.
    """
    code = "def f(x):\n    import fractions\n    return fractions.Fraction(x)"
    found = run_answer(code, ["assert f('1/2') == 0.5"], limits=Limits(START_TIMEOUT_S))
    if found.passed != (True,):
        raise UserError(
            f"the sandbox cannot run Python: in it, the modules below {sysconfig.get_path('stdlib')} must be readable "
            f"by user {os.getuid()} without privileges"
        )
    return tuple(layer for layer in LAYERS if layer not in found.layers)


def _readable() -> list[str]:
    """The readable paths: Python's modules, the libraries they link to, and time zones; no other data below /usr."""
    own = [sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED"), os.path.join(sys.base_prefix, "lib")]
    return [*filter(None, own), "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo"]


def _run_children(work: dict[str, Any], test: dict[str, Any], timeout_s: float) -> list[Any]:
    """The tester's report until the deadline; its first line is ["ready", layers]. A failed start is tried again."""
    said = ""
    for _ in range(2):
        try:
            lines, said = _try_children(work, test, timeout_s)
        except OSError as error:  # no process, no descriptor or no room is left
            lines, said = [], str(error)
        if lines:
            return lines
    raise UserError(
        f"the sandbox did not start, with {work['memory_mb']} MiB (task_args.memory_mb): {said}. "
        "`python -m tasks._sandbox` tries a small exercise"
    )


def _try_children(work: dict[str, Any], test: dict[str, Any], timeout_s: float) -> tuple[list[Any], str]:
    """The tester's report and, if that is empty, the last line that a child printed before it was ready."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True))
        errors = stack.enter_context(tempfile.TemporaryFile())
        report = _start_both(stack, {**work, "scratch": scratch}, {**test, "scratch": None}, errors)
        lines = _read_report(report, timeout_s)
        errors.seek(0)
        said = errors.read(1 << 16).decode("utf-8", "replace").strip().rpartition("\n")[2]
    return lines, said or f"it is silent, and not ready after {START_TIMEOUT_S:g} s"


def _start_both(stack: ExitStack, work: dict[str, Any], test: dict[str, Any], errors: IO[bytes]) -> int:
    """Start worker and tester, joined by pipes. Returns the descriptor from which the tester's report is read."""
    to_worker, to_tester, report = os.pipe(), os.pipe(), os.pipe()
    stack.callback(os.close, report[0])
    with ExitStack() as theirs:  # a pipe ends when the child at its other end does, and we hold no end
        for end in (*to_worker, *to_tester, report[1]):
            theirs.callback(os.close, end)
        _start(stack, work, "work", (to_worker[0], to_tester[1], -1), errors)
        _start(stack, test, "test", (to_tester[0], to_worker[1], report[1]), errors)
    return report[0]


def _start(stack: ExitStack, job: dict[str, Any], role: str, pipes: tuple[int, int, int], errors: IO[bytes]) -> None:
    """Start a child in a new session; it is killed when the stack unwinds. It reads its job from an unnamed file."""
    given = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    given.write(json.dumps(job).encode())
    given.seek(0)
    process = subprocess.Popen(
        # Like -I, and with a hash seed, so that an answer earns the same whenever it is run
        [sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c", _START, role, *map(str, pipes)],
        stdin=given,
        stdout=subprocess.DEVNULL,
        stderr=errors,
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


def _read_report(report: int, timeout_s: float) -> list[Any]:
    """The tester's lines until it ends or `timeout_s` seconds have passed since the first line.

    An incomplete last line is dropped.
    """
    poll = select.poll()
    poll.register(report, select.POLLIN)
    content, deadline = b"", time.monotonic() + START_TIMEOUT_S
    while (left := deadline - time.monotonic()) > 0 and len(content) < MOST_REPORT:
        if poll.poll(left * 1000):
            more = os.read(report, 1 << 16)
            if not more:
                break
            if b"\n" in more and b"\n" not in content:
                deadline = time.monotonic() + timeout_s
            content += more
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def main() -> None:
    missing = missing_layers()
    print(f"layers that hold: {', '.join(layer for layer in LAYERS if layer not in missing)}")
    print(f"layers that are missing: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
