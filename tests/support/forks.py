"""Runs programs of the package in forks of one interpreter that has imported them and done nothing more.

A fork starts at once, where a new interpreter takes seconds to import. This file, run as a script, is that interpreter.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
KILLED = -signal.SIGKILL
PROGRAMS = ("train", "evaluate", "sft", "experiment")

Kill = tuple[str, int]  # "module:attribute", and in which of its calls (1, 2, …) the process ends


class Forks:
    """Starts programs in a folder; their output goes to files there."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str]", env: Mapping[str, str]) -> None:
        self.folder, self.server, self.env = folder, server, env

    def run(
        self, program: str, log: str, options: Mapping[str, Any], processes: int = 1, kill: Kill | None = None
    ) -> list[int]:
        """Exit codes of the processes; rank 0 sends itself SIGKILL at `kill`, and the others follow it."""
        given = [f"{name}={value}" for name, value in options.items()]
        job = {"program": program, "options": given, "log": f"{log}.log", "processes": processes, "kill": kill}
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


@contextmanager
def forks(folder: Path) -> Iterator[Forks]:
    """A server of forks, on the CPU and with one thread."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=env, stdin=pipe, stdout=pipe, text=True) as server:
        yield Forks(folder, server, env)  # ends when its standard input does


def serve() -> None:
    """Run one job per line of standard input; answer each with the exit codes of its processes."""
    for program in PROGRAMS:
        importlib.import_module(f"vlm_grpo.{program}")
    for line in sys.stdin:
        job = json.loads(line)
        count, port = job["processes"], _free_port()
        children = []
        for rank in range(count):
            child = os.fork()
            if child == 0:
                if count > 1:
                    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in names.items()})
                    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo")
                _run(job, dies=rank == 0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])]
        for child in children[1:]:
            if codes[0] != 0:  # as a launcher does
                os.kill(child, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(json.dumps(codes), flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(job: Mapping[str, Any], dies: bool) -> None:
    """The job in this process, which ends with it."""
    from vlm_grpo.common.program import run

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv[1:] = job["options"]
    code = 0
    try:
        if dies and job["kill"]:
            _die_in(*job["kill"])
        run(importlib.import_module(f"vlm_grpo.{job['program']}").main)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_in(name: str, call: int) -> None:
    module, _, path = name.partition(":")
    *inner, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in inner:
        owner = getattr(owner, part)
    plain, count = getattr(owner, attribute), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **kwargs)

    setattr(owner, attribute, dying)


if __name__ == "__main__":
    serve()
