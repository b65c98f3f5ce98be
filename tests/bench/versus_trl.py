"""Compares one training step with that of TRL 1.16's GRPOTrainer: time of rollout and update, and peak memory.

    OMP_NUM_THREADS=2 python tests/bench/versus_trl.py --json versus.json

Same random Qwen2.5-VL, prompts, token counts (nothing can end a text early) and threads, float32 on the CPU; all
weights train, the vision tower too; beta is 0. Ours samples K = 4 thoughts with M = 4 answers each (in the setting
"plain" 16 thoughts with one), the peer 16 completions of the length of a thought and an answer. Both sides run in
processes of their own, one after the other, the peer in a virtual environment that is made on first use
(`.bench-venv`); it gets the micro-batch size at which its step is fastest. Memory is the peak of a step above what
weights and optimiser state take.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("peer_trl.py")
PEER_PACKAGES = ("trl==1.16.0", "datasets", "pillow")
SHARED_PACKAGES = ("torch", "torchvision", "transformers")  # the same versions on both sides
MICRO_BATCHES = (4, 8, 16, 32, 64)
QUESTION = "Give the bounding box of the red circle in this image as [x1, y1, x2, y2]."
MERGED_PATCH = 28  # side of an image token in pixels
LARGEST_IMAGE_SIDE = 30  # of any setting, in image tokens; larger images would be made smaller


@dataclass(frozen=True)
class Setting:
    """Token counts of one step."""

    image_side: int  # an image is a square of image_side² tokens
    thought_tokens: int
    answer_tokens: int
    num_prompts: int
    num_thoughts: int = 4
    num_answers: int = 4
    images_per_prompt: int = 1

    @property
    def completions(self) -> int:
        """Of one prompt; on the peer's side each is as long as a thought and an answer."""
        return self.num_thoughts * self.num_answers


SETTINGS = {
    "100-64+16-2": Setting(image_side=10, thought_tokens=64, answer_tokens=16, num_prompts=2),
    "400-128+32-1": Setting(image_side=20, thought_tokens=128, answer_tokens=32, num_prompts=1),
    "400-128+32-4": Setting(image_side=20, thought_tokens=128, answer_tokens=32, num_prompts=4),
    "400-128+32-4-plain": Setting(20, 128, 32, 4, num_thoughts=16, num_answers=1),
    "smoke": Setting(image_side=4, thought_tokens=6, answer_tokens=3, num_prompts=2),
}


def bench_model(folder: Path) -> list[int]:
    """Save a random model of 4 + 4 layers of 256 channels and its processor; returns the ids that must not be sampled.

    Tokenizer and processor are the shipped tiny model's. The chat template ends by opening the thought, so that both
    sides read the same prompt.
    """
    import torch
    from transformers import AutoProcessor, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    processor = AutoProcessor.from_pretrained(ROOT / "vlm_grpo" / "tiny")
    side = MERGED_PATCH * LARGEST_IMAGE_SIDE
    processor.image_processor.size = {"shortest_edge": MERGED_PATCH**2, "longest_edge": side**2}
    processor.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    ids = processor.tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4},
            "tie_word_embeddings": True,
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "pad_token_id": ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 4,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": 256,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=ids("<|im_end|>"), pad_token_id=ids("<|endoftext|>"))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sorted(processor.tokenizer.get_added_vocab().values())  # special tokens and tags


def write_workload(folder: Path, setting: Setting, suppress: list[int], options: argparse.Namespace) -> Path:
    """The file both sides read: where the model is, the prompts and the numbers of one step."""
    import torch
    from PIL import Image

    from vlm_grpo.tree.tags import FORMAT

    pixels = torch.Generator().manual_seed(0)
    assert setting.image_side <= LARGEST_IMAGE_SIDE, f"images of side {setting.image_side} would be made smaller"
    images = [[] for _ in range(setting.num_prompts)]
    for index in range(setting.num_prompts * setting.images_per_prompt):
        cells = torch.randint(256, (setting.image_side, setting.image_side, 3), generator=pixels, dtype=torch.uint8)
        size = (MERGED_PATCH * setting.image_side,) * 2
        path = folder / f"{index}.png"
        Image.fromarray(cells.numpy()).resize(size, Image.Resampling.BICUBIC).save(path)
        images[index // setting.images_per_prompt].append(str(path))
    workload = asdict(setting) | {
        "model": str(folder / "model"),
        "images": images,
        "our_question": QUESTION,
        "question": f"{QUESTION}\n{FORMAT}",  # what ours makes of its question
        "num_generations": setting.completions,
        "completion_tokens": setting.thought_tokens + setting.answer_tokens,
        "suppress_tokens": suppress,
        "threads": options.threads,
        "steps": options.steps,
        "gradient_checkpointing": options.gradient_checkpointing,
    }
    path = folder / "workload.json"
    path.write_text(json.dumps(workload))
    return path


def our_trainer(model_path: Path, workload: dict, **options):
    """The package's own trainer as the main job runs it, and the step's samples; only end-of-sequence ids and tags are
    never sampled.

    `options` are of StepConfig and ModelConfig and override the workload's.
    """
    import torch
    from PIL import Image

    from vlm_grpo.algorithm.trainer import StepConfig, Trainer
    from vlm_grpo.common.processes import Processes
    from vlm_grpo.data.reader import DataConfig, PromptReader
    from vlm_grpo.model.load import ModelConfig, load_vlm
    from vlm_grpo.task import Reward, Sample, TaskAdapter

    class EveryFourth(TaskAdapter):
        """Rewards as on the other side: 1 for every fourth answer."""

        def __init__(self) -> None:
            self.count = -1

        def samples(self, split: str) -> list[Sample]:
            return [
                Sample(paths[0], [Image.open(path) for path in paths], workload["our_question"], None)
                for paths in workload["images"]
            ]

        def reward(self, sample: Sample, answer: str) -> Reward:
            self.count += 1
            return Reward(float(self.count % 4 == 0))

        def reference_answer(self, sample: Sample) -> str:
            return ""

    torch.set_num_threads(workload["threads"])
    model = ModelConfig(
        model=str(model_path),
        freeze_vision=options.pop("freeze_vision", False),
        gradient_checkpointing=workload["gradient_checkpointing"],
    )
    vlm = load_vlm(model, temperature=1.0, device=torch.device("cpu"))
    vlm.forbidden = torch.tensor(sorted({*vlm.forbidden.tolist(), *workload["suppress_tokens"]}))
    settings = {
        "num_thoughts": workload["num_thoughts"],
        "num_answers": workload["num_answers"],
        "max_thought_length": workload["thought_tokens"],
        "max_answer_length": workload["answer_tokens"],
        "prompts_per_step": workload["num_prompts"],
        "learning_rate": 1e-6,
    }
    adapter = EveryFourth()
    reader = PromptReader(vlm.prompts, adapter, DataConfig(), max_prompt_length=10**6)
    return Trainer(vlm, adapter, reader, StepConfig(**settings | options), Processes()), adapter.samples("train")


def timed_steps(trainer, samples: list, steps: int, start) -> tuple[list[float], list[float]]:
    """Seconds of rollout and update of each step after the first; `start()` is called before the second."""
    config = trainer.config
    branch = config.max_thought_length + config.num_answers * config.max_answer_length
    rollout_s, update_s = [], []
    for step in range(1, 2 + steps):
        if step == 2:
            start()
        result = trainer.step(step, samples)
        sampled = config.prompts_per_step * config.num_thoughts * branch
        assert result.num_tokens == sampled, f"a branch ended early: {result.num_tokens} tokens, not {sampled}"
        if step > 1:
            update_s.append(result.metrics["time/update"])
            rollout_s.append(result.metrics["step_time"] - update_s[-1])
    return rollout_s, update_s


def run_ours(model_path: Path, workload: dict) -> dict:
    """Our side's `summary`, with prompt_tokens and trainable_parameters, after one warm-up step."""
    from peer_trl import PeakMemory, summary

    (trainer, samples), memory = our_trainer(model_path, workload), PeakMemory()
    rollout_s, update_s = timed_steps(trainer, samples, workload["steps"], memory.start)
    prompt = trainer.reader.read(samples)[0]
    return summary(rollout_s, update_s, memory.rise()) | {
        "prompt_tokens": len(prompt.ids),
        "trainable_parameters": sum(p.numel() for p in trainer.vlm.model.parameters() if p.requires_grad),
    }


def peer_python(given: Path | None) -> Path:
    """The interpreter of an environment that has the peer; without a given one, it is made where it is missing."""
    if given is not None:
        return given
    folder = ROOT / ".bench-venv"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        print(f"installing the peer into {folder} (some minutes, once)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pins = [f"{name}=={version(name).split('+')[0]}" for name in SHARED_PACKAGES]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES, *pins], check=True)
        complete.touch()
    return python


def measure(command: list, result: Path, threads: int) -> dict:
    """Run one side to its end in a process of its own and read what it wrote."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(result.read_text())


def compare(name: str, setting: Setting, folder: Path, workload: Path, options: argparse.Namespace) -> dict:
    """Both sides' figures in one setting, with the ratios peer ÷ ours."""
    python, result = peer_python(options.peer_python), folder / "result.json"
    samples = setting.num_prompts * setting.completions
    trial, trials = folder / "trial.json", {}
    trial.write_text(json.dumps(json.loads(workload.read_text()) | {"steps": 1}))
    sizes = [size for size in options.micro_batches if size <= samples] or [samples]
    for size in sizes if len(sizes) > 1 else ():
        command = [python, PEER, trial, result, "--micro-batch", size, "--warmup-steps", 0]
        trials[size] = measure(command, result, options.threads)
        print(f"{name}: trial of the peer with micro-batch {size}: {row(trials[size])}", flush=True)
    best = min(trials, key=lambda size: trials[size]["step_s"]) if trials else sizes[0]

    peer = measure([python, PEER, workload, result, "--micro-batch", best], result, options.threads)
    print(f"{name}: peer, micro-batch {best}: {row(peer)}", flush=True)
    report = {"peer": peer, "peer_trials": trials}
    if not options.peer_only:
        ours = measure([sys.executable, __file__, "--run-ours", workload, result], result, options.threads)
        print(f"{name}: ours: {row(ours)}", flush=True)
        for key in ("prompt_tokens", "trainable_parameters"):
            assert ours[key] == peer[key], f"the sides differ in {key}: ours {ours[key]}, the peer's {peer[key]}"
        report["ours"] = ours
        for kind, key in [
            ("step", "step_s"),
            ("rollout", "rollout_s"),
            ("update", "update_s"),
            ("memory", "memory_mib"),
        ]:
            report[f"{kind}_ratio"] = peer[key] / ours[key]
        ratios = ", ".join(f"{kind} {report[f'{kind}_ratio']:.2f}" for kind in ("step", "rollout", "update", "memory"))
        print(f"{name}: peer / ours: {ratios}", flush=True)
    return report


def row(figures: dict) -> str:
    phases = f"rollout {figures['rollout_s']:.2f} s + update {figures['update_s']:.2f} s = {figures['step_s']:.2f} s"
    return f"{phases}, peak memory {figures['memory_mib']:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = [name for name in SETTINGS if name != "smoke"]
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=chosen, metavar="NAME", help=", ".join(SETTINGS)
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps after one warm-up step")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, help="sizes the peer may choose from"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="on both sides; slower, less memory")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has trl 1.16.0 (default: .bench-venv's)")
    parser.add_argument("--peer-only", action="store_true", help="leave our side out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write {setting: {step_ratio, memory_ratio, …}}")
    parser.add_argument("--run-ours", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.run_ours:
        workload, result = options.run_ours
        figures = json.loads(workload.read_text())
        result.write_text(json.dumps(run_ours(Path(figures["model"]), figures)))
        return
    reports = {}
    for name in options.settings:
        with tempfile.TemporaryDirectory() as folder:
            suppress = bench_model(Path(folder) / "model")
            workload = write_workload(Path(folder), SETTINGS[name], suppress, options)
            reports[name] = compare(name, SETTINGS[name], Path(folder), workload, options)
        if options.json:
            options.json.write_text(json.dumps(reports, indent=2) + "\n")


if __name__ == "__main__":
    main()
