"""A run that is killed at any moment goes on to the same weights, bit for bit, as one that never was.

Most runs are forks (see forks.py) and kill themselves at a named point; others are `python -m vlm_grpo.train` and are
killed from outside.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.forks import KILLED, Forks, Kill, forks

TASK = """
import zlib
import torch
from tasks.refcoco import RefCOCO
from vlm_grpo.task import Reward

class Noisy(RefCOCO):
    # Rewards that tell every two answers apart, so that each step of a short run moves the weights
    def __init__(self, **args):
        super().__init__(**args)
        torch.seed()  # a task may do as it likes with random numbers that are not the trainer's

    def reward(self, sample, answer):
        value = zlib.crc32(answer.encode("utf-8", "replace")) % 101 / 100
        return Reward(value, {"iou": value, "acc@0.5": 0.0, "parsed": 0.0})

class Coarse(Noisy):
    # Rewards of 0 and 1, so that two answers often are worth the same
    def reward(self, sample, answer):
        value = float(super().reward(sample, answer).value > 0.5)
        return Reward(value, {"iou": value, "acc@0.5": 0.0, "parsed": 0.0})
"""
OPTIONS = {
    **{"task": "noisy_task:Noisy", "task_args": "{data: scenes, limit: 7}", "eval_split": ""},
    **{"max_steps": 4, "save_steps": 1, "save_total_limit": 2, "prompts_per_step": 2},
    **{"num_thoughts": 2, "num_answers": 2, "max_thought_length": 6, "max_answer_length": 6},
    **{"learning_rate": 0.01, "lr_scheduler": "linear", "warmup_steps": 2, "weight_decay": 0.1},
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "weights": {},
    "adapters": {"lora_r": 4, "beta": 0.1, "diagnostics_every": 2, "diagnostics_layers": "*q_proj.lora_B*"},
    "tower": {
        **{"freeze_vision": "false", "beta": 0.1, "num_iterations": 2, "prompts_per_minibatch": 1},
        **{"eval_split": "val", "eval_samples": 3, "eval_steps": 2},
    },
    "moving": {
        **{"beta": 0.1, "sync_ref_model": "true", "ref_model_sync_steps": 2, "advantage": "rloo"},
        **{"dynamic_sampling": "resample", "max_resamples": 2, "num_thoughts": 1, "task": "noisy_task:Coarse"},
    },
}
# Where a run may be killed
SCORE = "vlm_grpo.algorithm.trainer:score_trees"
LOSS = "vlm_grpo.algorithm.update:row_loss"
OPTIMISER = "torch.optim:AdamW.step"
METRICS = "vlm_grpo.train:MetricsWriter.write"
SAVE_MODEL_FILES = "vlm_grpo.train:save_model_files"
SAVE_FILE = "vlm_grpo.runs.checkpoint:save_file"
SYNC_TREE = "vlm_grpo.common.atomic:_sync_tree"
REMOVE = "vlm_grpo.runs.checkpoint:remove_whole"
REPLACE = "os:replace"
RMTREE = "shutil:rmtree"


class Runs:
    """Starts runs in a folder of its own; the whole run of each variant is made once."""

    def __init__(self, forks: Forks) -> None:
        self.forks, self.folder = forks, forks.folder
        (self.folder / "noisy_task.py").write_text(TASK)

    def options(self, name: str, variant: str, resume: bool = False, **changes: Any) -> dict[str, Any]:
        chosen = OPTIONS | VARIANTS[variant] | changes | {"output_dir": name}
        return chosen | {"resume_from_checkpoint": "true"} if resume else chosen

    def fork(
        self,
        name: str,
        variant: str = "weights",
        kill: Kill | None = None,
        resume: bool = False,
        processes: int = 1,
        **changes: Any,
    ) -> list[int]:
        """Exit codes of the processes of one run into the folder `name`."""
        return self.forks.run("train", name, self.options(name, variant, resume, **changes), processes, kill)

    def whole(self, variant: str = "weights", processes: int = 1) -> Path:
        """The folder of the run that nobody killed."""
        name = f"whole-{variant}-{processes}"
        if not (self.folder / name).exists():
            codes = self.fork(name, variant, processes=processes)
            assert codes == [0] * processes, self.forks.log(name)
        return self.folder / name

    def finish(self, name: str, variant: str = "weights", processes: int = 1) -> Path:
        codes = self.fork(name, variant, resume=True, processes=processes)
        assert codes == [0] * processes, self.forks.log(name)
        return self.folder / name

    def start(self, name: str, resume: bool) -> "subprocess.Popen[bytes]":
        """A run of its own: `python -m vlm_grpo.train`."""
        options = [f"{key}={value}" for key, value in self.options(name, "weights", resume).items()]
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [sys.executable, "-m", "vlm_grpo.train", *options]
            return subprocess.Popen(command, cwd=self.folder, env=self.forks.env, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with forks(tmp_path_factory.mktemp("runs")) as server:
        yield Runs(server)


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
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 for row in rows(whole))
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    before, after = (load_file(whole / f"checkpoint-{step}" / "model.safetensors") for step in (3, 4))
    assert any(not torch.equal(before[name], after[name]) for name in after)
    moments = load_file(whole / "checkpoint-4" / "optimizer.safetensors")
    assert all(value.any() for name, value in moments.items() if name.endswith("exp_avg"))


KILLS = {
    "options half written": ((REPLACE, 1), ".config.yaml.writing"),
    "first save": ((SAVE_MODEL_FILES, 1), ".checkpoint-1.writing"),
    "trees grown": ((SCORE, 3), "checkpoint-2"),
    "gradient made": ((OPTIMISER, 3), "checkpoint-2"),
    "metrics not written": ((METRICS, 3), "rollouts/step-000003.parquet"),
    "rollouts not renamed": ((REPLACE, 6), "rollouts/.step-000003.parquet.writing"),
    "model saved, moments not": ((SAVE_FILE, 3), ".checkpoint-3.writing/model.safetensors"),
    "saved, not synced": ((SYNC_TREE, 3), ".checkpoint-3.writing/trainer_state.json"),
    "synced, not renamed": ((REPLACE, 7), ".checkpoint-3.writing/trainer_state.json"),
    "renamed, old one there": ((REMOVE, 1), "checkpoint-1"),
    "old one half deleted": ((RMTREE, 5), ".checkpoint-1.deleting"),
    "last old one there": ((REMOVE, 2), "checkpoint-2"),
    "final model begun": ((SAVE_MODEL_FILES, 5), ".final-model.writing"),
    "final model half moved": ((REPLACE, 15), "final-model/model.safetensors"),
}


@pytest.mark.parametrize("point", KILLS)
def test_killed_run_ends_as_the_whole_one(runs: Runs, point: str) -> None:
    kill, left = KILLS[point]
    name = point.replace(" ", "-").replace(",", "")
    assert runs.fork(name, kill=kill) == [KILLED], runs.forks.log(name)
    assert (runs.folder / name / left).exists(), f"killed elsewhere: {files(runs.folder / name)}"
    assert_same_run(runs.finish(name), runs.whole())


@pytest.mark.parametrize(
    ("variant", "kill"),
    [
        ("adapters", (SAVE_FILE, 1)),  # begins anew: with the same first adapters
        ("adapters", (SAVE_FILE, 3)),
        ("tower", (LOSS, 10)),  # between two optimiser steps of one step
        ("tower", (SAVE_MODEL_FILES, 5)),  # no step is left to do, the table is
        ("moving", (SAVE_FILE, 4)),  # the reference has moved once, and other samples came in for silent ones
    ],
)
def test_killed_variant_ends_as_the_whole_one(runs: Runs, variant: str, kill: tuple[str, int]) -> None:
    name = f"{variant}-{kill[1]}"
    assert runs.fork(name, variant, kill) == [KILLED], runs.forks.log(name)
    assert_same_run(runs.finish(name, variant), runs.whole(variant))
    if VARIANTS[variant].get("beta"):
        assert rows(runs.folder / name)[-1]["kl"] > 0
    if VARIANTS[variant].get("dynamic_sampling"):
        assert any(row["resampled_prompts"] > 0 for row in rows(runs.whole(variant)))
    if VARIANTS[variant].get("eval_split"):
        assert table(runs, name) == table(runs, runs.whole(variant).name)


def table(runs: Runs, name: str) -> str:
    """The last before/after table of a log."""
    return (runs.folder / f"{name}.log").read_text().rpartition("before ")[2].partition("\n\n")[0]


def test_run_killed_again_and_again_ends_as_the_whole_one(runs: Runs) -> None:
    for kill in ((LOSS, 1), (REPLACE, 4), (SYNC_TREE, 1), (OPTIMISER, 2), (REMOVE, 1), (SYNC_TREE, 2)):
        assert runs.fork("again", kill=kill, resume=True) == [KILLED], runs.forks.log("again")
    assert_same_run(runs.finish("again"), runs.whole())


def test_program_killed_from_outside_while_it_saves_ends_as_the_whole_one(runs: Runs) -> None:
    folder = runs.folder / "outside"
    for step in (2, 3):
        saves = [folder / f".checkpoint-{step}.writing", folder / f"checkpoint-{step}"]
        with runs.start("outside", resume=step > 2) as process:
            while process.poll() is None and not any(path.exists() for path in saves):
                time.sleep(0.0005)
            process.kill()
        assert process.returncode == KILLED, runs.forks.log("outside")
    with runs.start("outside", resume=True) as process:
        pass
    assert process.returncode == 0, runs.forks.log("outside")
    assert_same_run(folder, runs.whole())


def test_two_processes_killed_and_resumed_end_as_the_whole_run(runs: Runs) -> None:
    codes = runs.fork("two", kill=(SAVE_FILE, 3), processes=2)
    assert codes[0] == KILLED, runs.forks.log("two")
    assert_same_run(runs.finish("two", processes=2), runs.whole(processes=2))


def test_another_number_of_processes_may_go_on_with_a_run(runs: Runs) -> None:
    """It draws other samples than the old number would have, on the same prompts in the same order."""
    assert runs.fork("grown", kill=(SAVE_FILE, 3)) == [KILLED], runs.forks.log("grown")
    grown, whole = runs.finish("grown", processes=2), runs.whole()
    assert rows(grown)[:2] == rows(whole)[:2]
    assert [row["step"] for row in rows(grown)] == [1, 2, 3, 4]
    assert rows(grown)[2] != rows(whole)[2]
    for name in ("rollouts/step-000003.parquet", "rollouts/step-000004.parquet"):
        ids = [set(pq.read_table(folder / name)["sample_id"].to_pylist()) for folder in (grown, whole)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("variant", ["weights", "adapters"])
def test_final_model_loads_plainly_and_is_the_last_checkpoint(runs: Runs, variant: str) -> None:
    from support import families
    from transformers import AutoModelForImageTextToText, AutoProcessor

    logits = []
    whole = runs.whole(variant)
    for folder in (whole, whole / "checkpoint-4", whole / "checkpoint-3"):
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
    assert re.search(r"error: .*learning_rate was 0.01, is now 0.02", runs.forks.log(name))
    assert runs.fork(name) == [2]
    assert re.search(r"error: .*holds another run", runs.forks.log(name))
    assert files(runs.whole()) == before
