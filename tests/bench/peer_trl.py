"""Times one step of TRL's GRPOTrainer on a workload that versus_trl.py wrote. Runs in an environment of its own.

    python tests/bench/peer_trl.py WORKLOAD.json RESULT.json --micro-batch 16

Apart from the workload's numbers, the trainer is TRL's own: generation, vision path and loss; all weights train.
"""

import argparse
import ctypes
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path


class PeakMemory:
    """Bytes by which this process's resident memory rises above its level at `start` (Linux).

    Start it after a first step, when weights and optimiser state exist: memory that the allocator only holds back for
    reuse is given to the system first, and the kernel's high-water mark is reset.
    """

    def __init__(self) -> None:
        self.baseline = 0

    def start(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.baseline = self._status("VmRSS")

    def rise(self) -> int:
        return self._status("VmHWM") - self.baseline

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def summary(rollout_s: list[float], update_s: list[float], memory_bytes: int) -> dict[str, float]:
    """Medians over the measured steps: what both sides report."""
    return {
        "rollout_s": statistics.median(rollout_s),
        "update_s": statistics.median(update_s),
        "step_s": statistics.median([r + u for r, u in zip(rollout_s, update_s, strict=True)]),
        "memory_mib": memory_bytes / 2**20,
    }


def run_peer(workload: dict, micro_batch: int, warmup_steps: int) -> dict:
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(workload["threads"])
    samples = workload["num_prompts"] * workload["num_generations"]
    assert samples % micro_batch == 0, f"{samples} completions do not split into micro-batches of {micro_batch}"
    memory = PeakMemory()
    rollout_s, step_s, shapes = [], [], []

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            rollout_s.append(time.perf_counter() - start)
            lengths = batch["completion_mask"].sum(dim=1)
            assert (lengths == workload["completion_tokens"]).all(), f"completions ended early: {lengths.tolist()}"
            shapes.append({"rows": len(lengths), "prompt_tokens": batch["prompt_mask"].sum(dim=1)[0].item()})
            return batch

    class StepTimer(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == warmup_steps:
                memory.start()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            step_s.append(time.perf_counter() - self.start)

    def reward(completions, **_):
        return [float(i % 4 == 0) for i in range(len(completions))]

    rows = [
        {
            "prompt": [{"role": "user", "content": workload["question"]}],
            "images": [Image.open(path).convert("RGB") for path in paths],
        }
        for paths in workload["images"]
    ]
    model = AutoModelForImageTextToText.from_pretrained(workload["model"], dtype=torch.float32)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=samples // micro_batch,
            gradient_checkpointing=workload["gradient_checkpointing"],
            num_generations=workload["num_generations"],
            max_completion_length=workload["completion_tokens"],
            generation_kwargs={"suppress_tokens": workload["suppress_tokens"]},
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=1e-6,
            max_steps=warmup_steps + workload["steps"],
            shuffle_dataset=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model,
            reward,
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoProcessor.from_pretrained(workload["model"]),
            callbacks=[StepTimer()],
        )
        trainer.train()
    measured = slice(warmup_steps, None)
    update_s = [step - rollout for step, rollout in zip(step_s[measured], rollout_s[measured], strict=True)]
    assert shapes[0]["rows"] == samples, f"one step has {shapes[0]['rows']} completions, the workload {samples}"
    return summary(rollout_s[measured], update_s, memory.rise()) | {
        "micro_batch": micro_batch,
        "prompt_tokens": shapes[0]["prompt_tokens"],
        "trainable_parameters": trainable,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--micro-batch", type=int, required=True, help="completions per forward and backward pass")
    parser.add_argument("--warmup-steps", type=int, default=1, help="steps before the measured ones")
    args = parser.parse_args()
    result = run_peer(json.loads(args.workload.read_text()), args.micro_batch, args.warmup_steps)
    args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
