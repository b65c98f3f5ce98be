"""Processes of a run that end."""

import os
import socket
import subprocess
import sys

import pytest

MAIN = """
import os, sys
import torch
from torch import nn
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import start_processes
from vlm_grpo.common.program import run

def main(argv):
    processes = start_processes()
    parameter = nn.Parameter(torch.zeros(2))
    processes.wait()
    if processes.rank == 0:
        raise UserError("the reason")
    if argv[0] == "foreign":
        raise RuntimeError("a pipe was closed by peer")
    {"gather": lambda: processes.gather([1]), "sum": lambda: processes.sum_gradients([parameter]),
     "wait": processes.wait}[argv[0]]()

run(main)
"""


def start(call: str) -> list["subprocess.Popen[str]"]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-c", MAIN, call],
            env=os.environ | shared | {"ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("call", ["gather", "sum", "wait"])
def test_a_process_whose_peer_has_ended_says_so_and_ends(call: str) -> None:
    first, second = ((process.communicate(timeout=120)[1], process.returncode) for process in start(call))
    assert "error: the reason" in first[0] and first[1] == 2
    assert "process 1 ends, since it lost another one" in second[0] and "Traceback" not in second[0] and second[1] == 1


def test_an_error_that_only_sounds_like_a_lost_peer_keeps_its_traceback() -> None:
    _, second = ((process.communicate(timeout=120)[1], process.returncode) for process in start("foreign"))
    assert "Traceback" in second[0] and "a pipe was closed by peer" in second[0] and second[1] == 1
