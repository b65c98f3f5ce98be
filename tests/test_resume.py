"""A run that is killed at any moment goes on to the same weights, bit for bit, as one that never was.

Most runs are forks of one interpreter that has imported the trainer and done nothing more (this file, run as a
script), and kill themselves at a named point; others are `python -m vlm_grpo.train` and are killed from outside.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

TASK = """
import zlib
from tasks.refcoco import RefCOCO
from vlm_grpo.task import Reward

class Noisy(RefCOCO):
    # Rewards that tell every two answers apart, so that each step of a short run moves the weights
    def reward(self, sample, answer):
        value = zlib.crc32(answer.encode("utf-8", "replace")) % 101 / 100
        return Reward(value, {"iou": value, "acc@0.5": 0.0, "parsed": 0.0})
"""
OPTIONS = {
    **{"task": "noisy_task:Noisy", "task_args": "{data: scenes, limit: 7}", "eval_split": ""},
    **{"max_steps": 5, "save_steps": 1, "save_total_limit": 2, "prompts_per_step": 2},
    **{"num_thoughts": 2, "num_answers": 2, "max_thought_length": 6, "max_answer_length": 6},
    **{"learning_rate": 0.01, "lr_scheduler": "linear", "warmup_steps": 2, "weight_decay": 0.1},
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "weights": {},
    "adapters": {"lora_r": 4, "beta": 0.1},
    "tower": {
        **{"freeze_vision": "false", "beta": 0.1, "num_iterations": 2, "prompts_per_minibatch": 1},
        **{"eval_split": "val", "eval_samples": 3, "eval_steps": 2, "max_steps": 4},
    },
}
KILLED = -signal.SIGKILL


def serve() -> None:
    """Run one job per line of standard input in forks of this process; answer each with the exit codes of its ranks."""
    import vlm_grpo.train

    for line in sys.stdin:
        job = json.loads(line)
        port = free_port()
        ranks = range(job["processes"])
        children = []
        for rank in ranks:
            child = os.fork()
            if child == 0:
                if len(ranks) > 1:
                    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks), "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in names.items()})
                    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo")
                run_job(job, vlm_grpo.train.main, dies=rank == 0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])]
        for child in children[1:]:
            if codes[0] != 0:  # as a launcher does
                os.kill(child, signal.SIGKILL)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(json.dumps(codes), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_job(job: Mapping[str, Any], main: Any, dies: bool) -> None:
    """The job's run in this process, which ends with it."""
    from vlm_grpo.program import run

    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv[1:] = job["options"]
    if dies and job["kill"]:
        die_in(*job["kill"])
    try:
        run(main)
    except SystemExit as error:
        os._exit(int(error.code or 0))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def die_in(name: str, call: int) -> None:
    """SIGKILL this process in the given call (1, 2, …) of a function, before it does anything."""
    from vlm_grpo import checkpoint, train, trainer

    owner: Any
    owner, attribute = {
        "score": (trainer, "score_trees"),
        "loss": (trainer, "policy_loss"),
        "optimiser": (torch.optim.AdamW, "step"),
        "metrics": (train.MetricsWriter, "write"),
        "save_model_files": (train, "save_model_files"),
        "save_file": (checkpoint, "save_file"),
        "sync_tree": (checkpoint, "_sync_tree"),
        "remove": (checkpoint, "_remove"),
        "replace": (os, "replace"),
        "rmtree": (shutil, "rmtree"),
    }[name]
    plain, count = getattr(owner, attribute), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **kwargs)

    setattr(owner, attribute, dying)


class Runs:
    """Starts runs in a folder of its own; the whole run of each variant is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "noisy_task.py").write_text(TASK)
        repository = Path(__file__).parent.parent
        self.env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repository)}
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def options(self, name: str, variant: str, resume: bool = False, **changes: Any) -> list[str]:
        chosen = OPTIONS | VARIANTS[variant] | changes | {"output_dir": name}
        if resume:
            chosen |= {"resume_from_checkpoint": "true"}
        return [f"{key}={value}" for key, value in chosen.items()]

    def fork(
        self,
        name: str,
        variant: str = "weights",
        kill: tuple[str, int] | None = None,
        resume: bool = False,
        processes: int = 1,
        **changes: Any,
    ) -> list[int]:
        """Exit codes of the processes of one run into the folder `name`."""
        options = self.options(name, variant, resume, **changes)
        job = {"options": options, "kill": kill, "log": f"{name}.log", "processes": processes}
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def whole(self, variant: str = "weights", processes: int = 1) -> Path:
        """The folder of the run that nobody killed."""
        name = f"whole-{variant}-{processes}"
        if not (self.folder / name).exists():
            codes = self.fork(name, variant, processes=processes)
            assert codes == [0] * processes, self.log(name)
        return self.folder / name

    def finish(self, name: str, variant: str = "weights", processes: int = 1) -> Path:
        codes = self.fork(name, variant, resume=True, processes=processes)
        assert codes == [0] * processes, self.log(name)
        return self.folder / name

    def start(self, name: str, resume: bool) -> "subprocess.Popen[bytes]":
        """A run of its own: `python -m vlm_grpo.train`."""
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [sys.executable, "-m", "vlm_grpo.train", *self.options(name, "weights", resume)]
            return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    assert made.server.stdin and made.server.stdout
    made.server.stdin.close()
    made.server.wait()
    made.server.stdout.close()


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "time" not in k} for line in lines]


def files(folder: Path) -> list[str]:
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in found if not name.startswith("tensorboard/"))


def assert_same_run(killed: Path, whole: Path) -> None:
    assert files(killed) == files(whole)
    for name in files(whole):
        if name.endswith((".safetensors", "trainer_state.json")):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), f"{name} differs"
        elif name.endswith(".parquet"):
            assert pq.read_table(killed / name).equals(pq.read_table(whole / name)), f"{name} differs"
    assert rows(killed) == rows(whole)


def test_the_whole_run_moves_weights_and_momentum_in_every_step(runs: Runs) -> None:
    from safetensors.torch import load_file

    whole = runs.whole()
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4, 5]
    assert all(row["grad_norm"] > 0 for row in rows(whole))
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    before, after = (load_file(whole / f"checkpoint-{step}" / "model.safetensors") for step in (4, 5))
    assert any(not torch.equal(before[name], after[name]) for name in after)
    moments = load_file(whole / "checkpoint-5" / "optimizer.safetensors")
    assert all(value.any() for name, value in moments.items() if name.endswith("exp_avg"))


KILLS = {
    "options half written": (("replace", 1), ".config.yaml.writing"),
    "first save": (("save_model_files", 1), ".checkpoint-1.writing"),
    "trees grown": (("score", 3), "checkpoint-2"),
    "gradient made": (("optimiser", 3), "checkpoint-2"),
    "metrics not written": (("metrics", 3), "rollouts/step-000003.parquet"),
    "rollouts not renamed": (("replace", 6), "rollouts/.step-000003.parquet.writing"),
    "model saved, moments not": (("save_file", 3), ".checkpoint-3.writing/model.safetensors"),
    "saved, not synced": (("sync_tree", 3), ".checkpoint-3.writing/trainer_state.json"),
    "synced, not renamed": (("replace", 7), ".checkpoint-3.writing/trainer_state.json"),
    "renamed, old one there": (("remove", 1), "checkpoint-1"),
    "old one half deleted": (("rmtree", 5), ".checkpoint-1.deleting"),
    "last old one there": (("remove", 3), "checkpoint-3"),
    "final model begun": (("save_model_files", 6), ".final-model.writing"),
    "final model half moved": (("replace", 18), "final-model/model.safetensors"),
}


@pytest.mark.parametrize("point", KILLS)
def test_killed_run_ends_as_the_whole_one(runs: Runs, point: str) -> None:
    kill, left = KILLS[point]
    name = point.replace(" ", "-").replace(",", "")
    assert runs.fork(name, kill=kill) == [KILLED], runs.log(name)
    assert (runs.folder / name / left).exists(), f"killed elsewhere: {files(runs.folder / name)}"
    assert_same_run(runs.finish(name), runs.whole())


@pytest.mark.parametrize(
    ("variant", "kill"),
    [
        ("adapters", ("save_file", 1)),  # begins anew: with the same first adapters
        ("adapters", ("save_file", 3)),
        ("tower", ("loss", 10)),  # between two optimiser steps of one step
        ("tower", ("save_model_files", 5)),  # no step is left to do, the table is
    ],
)
def test_killed_variant_ends_as_the_whole_one(runs: Runs, variant: str, kill: tuple[str, int]) -> None:
    name = f"{variant}-{kill[0]}-{kill[1]}"
    assert runs.fork(name, variant, kill) == [KILLED], runs.log(name)
    assert_same_run(runs.finish(name, variant), runs.whole(variant))
    if VARIANTS[variant].get("beta"):
        assert rows(runs.folder / name)[-1]["kl"] > 0
    if VARIANTS[variant].get("eval_split"):
        assert table(runs, name) == table(runs, runs.whole(variant).name)


def table(runs: Runs, name: str) -> str:
    """The last before/after table of a log."""
    return (runs.folder / f"{name}.log").read_text().rpartition("before ")[2].partition("\n\n")[0]


def test_run_killed_again_and_again_ends_as_the_whole_one(runs: Runs) -> None:
    for kill in (("loss", 1), ("replace", 4), ("sync_tree", 1), ("optimiser", 2), ("remove", 1), ("sync_tree", 2)):
        assert runs.fork("again", kill=kill, resume=True) == [KILLED], runs.log("again")
    assert_same_run(runs.finish("again"), runs.whole())


def kill_at_sight(process: "subprocess.Popen[bytes]", *paths: Path) -> None:
    """SIGKILL as soon as one of the paths exists."""
    stop = time.monotonic() + 60
    while not any(path.exists() for path in paths):
        assert process.poll() is None and time.monotonic() < stop, f"ended with {process.returncode} before {paths}"
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == KILLED


def test_program_killed_from_outside_while_it_saves_ends_as_the_whole_one(runs: Runs) -> None:
    whole = runs.whole()
    folder = runs.folder / "outside"
    kill_at_sight(runs.start("outside", resume=False), folder / ".checkpoint-2.writing", folder / "checkpoint-2")
    kill_at_sight(runs.start("outside", resume=True), folder / ".final-model.writing", folder / "final-model")
    process = runs.start("outside", resume=True)
    assert process.wait() == 0, runs.log("outside")
    assert_same_run(folder, whole)


def test_two_processes_killed_and_resumed_end_as_the_whole_run(runs: Runs) -> None:
    codes = runs.fork("two", kill=("save_file", 3), processes=2)
    assert codes[0] == KILLED, runs.log("two")
    assert_same_run(runs.finish("two", processes=2), runs.whole(processes=2))


def test_another_number_of_processes_may_go_on_with_a_run(runs: Runs) -> None:
    """It draws other samples than the old number would have, on the same prompts in the same order."""
    assert runs.fork("grown", kill=("save_file", 4)) == [KILLED], runs.log("grown")
    grown, whole = runs.finish("grown", processes=2), runs.whole()
    assert rows(grown)[:3] == rows(whole)[:3]
    assert [row["step"] for row in rows(grown)] == [1, 2, 3, 4, 5]
    assert rows(grown)[3] != rows(whole)[3]
    for name in ("rollouts/step-000004.parquet", "rollouts/step-000005.parquet"):
        ids = [set(pq.read_table(folder / name)["sample_id"].to_pylist()) for folder in (grown, whole)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("variant", ["weights", "adapters"])
def test_final_model_loads_plainly_and_is_the_last_checkpoint(runs: Runs, variant: str) -> None:
    import families
    from transformers import AutoModelForImageTextToText, AutoProcessor

    logits = []
    whole = runs.whole(variant)
    for folder in (whole, whole / "checkpoint-5", whole / "checkpoint-4"):
        processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        content = [{"type": "image"}, {"type": "text", "text": "Locate: the red circle"}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        inputs = processor(text=[text], images=families.noise_images(1), return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[1], logits[2])


def test_other_options_are_refused_and_nothing_is_lost(runs: Runs) -> None:
    name = runs.whole().name
    before = files(runs.whole())
    assert runs.fork(name, resume=True, learning_rate=0.02) == [2]
    assert re.search(r"error: .*learning_rate was 0.01, is now 0.02", runs.log(name))
    assert runs.fork(name) == [2]
    assert re.search(r"error: .*holds another run", runs.log(name))
    assert files(runs.whole()) == before


if __name__ == "__main__":
    serve()
