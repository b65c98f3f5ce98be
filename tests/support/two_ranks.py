"""Two processes with unequal prompts, for test_behaviours: run as a script, it is both of them.

    python tests/two_ranks.py FOLDER

The script imports the package once and forks; rank r writes FOLDER/rank-r.json. It ends with 0 if both ranks did.
"""

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from support import families
from vlm_grpo import train
from vlm_grpo.algorithm.advantage import group_advantages
from vlm_grpo.algorithm.trainer import Graded, StepConfig, Trainer
from vlm_grpo.common.processes import Processes, start_processes
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.rollout.sampling import sampler
from vlm_grpo.task import Reward, Sample, TaskAdapter

IMAGES = (1, 0, 3, 0, 1)  # of the prompts whose gradient is compared
CONFIG = StepConfig(num_thoughts=3, num_answers=2, max_thought_length=6, max_answer_length=4, beta=0.05)
LAYERS = ["*layers.0.mlp.down_proj.weight", "*layers.1.self_attn.q_proj.weight"]
LOOK = replace(CONFIG, diagnostics_every=1, diagnostics_layers=LAYERS)


class Mixed(TaskAdapter):
    """Samples with an image, without one, and with a file that is none."""

    def __init__(self, kinds: str, folder: str) -> None:
        self.kinds, self.folder = kinds, Path(folder)

    def samples(self, split: str) -> Sequence[Sample]:
        images: dict[str, list[Any]] = {"i": [Image.new("RGB", (40, 30))], "t": [], "b": [self.folder / "bad.png"]}
        return [Sample(f"{split}-{i}", images[kind], "Why?", None) for i, kind in enumerate(self.kinds)]

    def reward(self, sample: Sample, answer: str) -> Reward:
        return Reward(len(answer) % 5 / 4)

    def reference_answer(self, sample: Sample) -> str:
        return "yes"


def graded_trees(vlm: VLM, config: StepConfig = CONFIG, images: Sequence[int] = IMAGES) -> list[Graded]:
    """One sampled tree per prompt with made-up rewards, some missing; the same on every rank."""
    questions = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
    samples = [Sample(f"s{i}", families.noise_images(n, i), questions[i % 3], None) for i, n in enumerate(images)]
    prompts = [vlm.prompts.build(sample) for sample in samples]
    with torch.no_grad():
        features = vlm.encode(prompts)
        generator = torch.Generator().manual_seed(1)
        trees = Engine(vlm, config).rollout(prompts, features, sampler(config, generator))
    graded = []
    for place, (tree, of_prompt) in enumerate(zip(trees, features, strict=True)):
        rewards = torch.randint(4, (config.num_thoughts, config.num_answers), generator=generator) / 3
        rewards[0, place % config.num_answers] = torch.nan
        graded.append(Graded(ScoredTree(tree, (), ()), group_advantages(rewards, config), of_prompt, place))
    return graded


def make_trainer(vlm: VLM, config: StepConfig = CONFIG, processes: Processes | None = None) -> Trainer:
    task = Mixed("", ".")
    return Trainer(vlm, task, PromptReader(vlm.prompts, task, DataConfig(), 10_000), config, processes or Processes())


def gradient(trainer: Trainer, graded: Sequence[Graded]) -> dict[str, torch.Tensor]:
    """Of one minibatch, over all processes of the trainer."""
    trainer.vlm.model.zero_grad(set_to_none=True)
    trainer.backward(graded, on_policy=True)
    trainer.processes.sum_gradients([p for _, p in trainer.optimizer.named])
    return {name: p.grad.clone() for name, p in trainer.optimizer.named if p.grad is not None}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two gradients, relative to the second; a missing gradient is zero."""
    zero = torch.zeros(())
    total = sum(float((ours.get(n, zero) - theirs.get(n, zero)).square().sum()) for n in {*ours, *theirs})
    return (total / sum(float(g.square().sum()) for g in theirs.values())) ** 0.5


def gradient_errors(processes: Processes) -> dict[str, float]:
    """Relative error of the gradient of two ranks with unequal prompts, and of a look at it, against one process."""
    errors = {}
    for tower in ("trains", "frozen"):
        vlm = VLM(families.load_model("qwen2_5_vl"), families.load_processor("qwen2_5_vl"))
        for name, parameter in vlm.model.named_parameters():
            parameter.requires_grad_(tower == "trains" or not name.startswith(vlm.family.vision_modules))
        vlm.keep_reference()
        graded = graded_trees(vlm)
        alone = gradient(make_trainer(vlm), graded)
        looked = make_trainer(vlm, LOOK).diagnose(graded)
        trainer = make_trainer(vlm, processes=processes)
        # As a step deals them out; all to rank 0; images to one rank, texts to the other
        shares = {
            "dealt": lambda place: place % 2,
            "idle": lambda place: 0,
            "by kind": lambda place: min(1, IMAGES[place]),
        }
        for share, rank_of in shares.items():
            own = [g for g in graded if rank_of(g.place) == processes.rank]
            errors[f"{tower}, {share}"] = difference(gradient(trainer, own), alone)
            found = make_trainer(vlm, LOOK, processes).diagnose(own)
            assert found.keys() == looked.keys(), f"{found} and {looked}"
            errors[f"{tower}, {share}, look"] = max(abs(found[name] / looked[name] - 1) for name in looked)
    return errors


def weights_after(folder: Path, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """A run of the main job; a digest of this rank's weights at its end."""
    runs: list[train.Run] = []

    class Recorded(train.Run):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            runs.append(self)

    plain, train.Run = train.Run, Recorded
    steps = ["max_steps=2", "num_thoughts=2", "num_answers=2", "max_thought_length=5", "max_answer_length=4"]
    task = ["task=two_ranks:Mixed", f"task_args.folder={folder}", "eval_samples=3", "eval_steps=1", "save_steps=1"]
    try:
        train.main([*steps, *task, f"output_dir={folder / name}", *arguments])
    finally:
        train.Run = plain
    weights = {n: float(p.double().square().sum()) for n, p in runs[0].vlm.model.named_parameters()}
    return {"weights": weights, "skipped": runs[0].reader.skipped.bad}


def work(folder: Path, rank: int) -> None:
    processes = start_processes()
    runs = {
        # Rank 1 has one prompt less than rank 0, and some of a rank's prompts have no image or a bad one
        "less": ["task_args.kinds=itbit", "prompts_per_step=3", "on_bad_sample=skip", "freeze_vision=false"],
        # Rank 1 never has a prompt
        "none": ["task_args.kinds=itt", "prompts_per_step=1"],
    }
    found = {name: weights_after(folder, name, arguments) for name, arguments in runs.items()}
    found["errors"] = gradient_errors(processes)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    processes.wait()


def main(folder: Path) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "bad.png").write_bytes(b"no image")
    sys.modules["two_ranks"] = sys.modules[__name__]
    families.cached_folder("qwen2_5_vl")  # built once: transformers lets rank 0 alone write it
    children = set()
    for rank in range(2):
        child = os.fork()
        if child == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo")
            code = 1
            try:
                work(folder, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        children.add(child)
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0 and not failed:
            failed = True
            for other in children:  # as a launcher does
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
