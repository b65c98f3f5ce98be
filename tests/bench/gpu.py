"""Checks the attention backends against each other on a GPU, then times them and the unpacked pass.

    python tests/bench/gpu.py

A random Qwen2.5-VL of about 1.2 B weights, images of 1,024 tokens, thoughts of 512 and answers of 64 tokens that
nothing can end early, 4 × 4 and 8 × 8 branches a prompt, two prompts a step; weights in float32, arithmetic in
bfloat16, the tower frozen, as the package trains on a GPU. Rollout: from prompts to trees, images included; decoding
goes the dense way under every backend, so it is timed once. Update: log-probabilities and gradients of all weights.
Unpacked: transformers' `generate` with one sequence per answer, and one ordinary forward and backward of each.
`--tiny` runs all of it with tiny sizes on a CPU, where flash is its reference in plain torch.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vlm_grpo.common.errors import UserError  # noqa: E402
from vlm_grpo.model.attention import varlen_kernel  # noqa: E402
from vlm_grpo.model.backend import choose_backend, find_environment  # noqa: E402
from vlm_grpo.model.features import Features, join_features  # noqa: E402
from vlm_grpo.model.vlm import VLM  # noqa: E402
from vlm_grpo.rollout.engine import Engine  # noqa: E402
from vlm_grpo.rollout.growth import RolloutConfig  # noqa: E402
from vlm_grpo.rollout.sampling import sampler  # noqa: E402
from vlm_grpo.task import Sample  # noqa: E402
from vlm_grpo.tree.pack import TreePack, pack, tree_segments, with_weights  # noqa: E402
from vlm_grpo.tree.types import Prompt, RolloutTree  # noqa: E402

MERGED_PATCH = 28  # side of an image token in pixels
QUESTION = "Give the bounding box of the red circle in this image as [x1, y1, x2, y2]."


@dataclass(frozen=True)
class Sizes:
    """Of the model and of one step."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    tower: tuple[int, int]  # channels, layers
    image_side: int  # an image is a square of image_side² tokens
    thought: int  # tokens
    answer: int
    branches: tuple[tuple[int, int], ...]  # (K, M)
    prompts: int
    micro_batch: int  # sequences of one unpacked forward


FULL = Sizes(2048, 5632, 16, 151_936, (1280, 8), 32, 512, 64, ((4, 4), (8, 8)), 2, 8)
TINY = Sizes(64, 96, 2, 600, (32, 2), 2, 6, 3, ((2, 2),), 2, 4)


def build(sizes: Sizes, device: torch.device):
    """The random model in float32, its tower frozen, and its processor, which is the shipped tiny model's."""
    processor = AutoProcessor.from_pretrained(ROOT / "vlm_grpo" / "tiny")
    pixels = (MERGED_PATCH * sizes.image_side) ** 2
    processor.image_processor.size = {"shortest_edge": MERGED_PATCH**2, "longest_edge": pixels}
    ids = processor.tokenizer.convert_tokens_to_ids
    heads = max(sizes.hidden // 128, 4)
    quarter = sizes.hidden // heads // 8  # rotary frequencies: half a head, split 2 : 3 : 3
    width, depth = sizes.tower
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": max(sizes.vocabulary, len(processor.tokenizer)),
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4 * quarter - 2 * (quarter * 3 // 2), *(2 * [quarter * 3 // 2])],
                "rope_theta": 1e6,
            },
            "tie_word_embeddings": True,
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "pad_token_id": ids("<|endoftext|>"),
        },
        vision_config={
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": width * 8 // 3,
            "num_heads": max(width // 80, 2),
            "out_hidden_size": sizes.hidden,
            "window_size": 112,
            "fullatt_block_indexes": [depth - 1],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=ids("<|im_end|>"), pad_token_id=ids("<|endoftext|>"))
    model.model.visual.requires_grad_(False)
    return model.eval(), processor


def samples(sizes: Sizes) -> list[Sample]:
    side = MERGED_PATCH * sizes.image_side
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (sizes.prompts, side, side, 3), generator=generator, dtype=torch.uint8)
    return [Sample(f"s{i}", [Image.fromarray(image.numpy())], QUESTION, None) for i, image in enumerate(images)]


class Bench:
    """One model on one device, taken by each backend in turn."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.failed: list[str] = []  # backends beyond their tolerance
        self.autocast = torch.bfloat16 if device.type == "cuda" else None
        self.model, self.processor = build(sizes, device)
        vlm = self.vlm("sdpa")
        self.samples = samples(sizes)
        self.prompts = [vlm.prompts.build(sample) for sample in self.samples]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def vlm(self, backend, exact: bool = False) -> VLM:
        """The model under a backend; `exact`: float32 arithmetic."""
        return VLM(self.model, self.processor, autocast=None if exact else self.autocast, attention=backend)

    def backends(self) -> list[str]:
        """Those that there are; what is missing is said."""
        if self.device.type == "cpu":
            return ["sdpa", "flex", "flash_reference"]
        found = ["sdpa"]
        for backend in ("flex", "flash"):
            try:
                found.append(choose_backend(backend, find_environment(self.device, torch.bfloat16, causal=True))[0])
            except UserError as error:
                print(f"left out: {error}")
        return found

    def trains(self, backend: str) -> bool:
        return backend != "flex" or self.device.type != "cpu"

    def timed(self, work: Callable[[], object], repeats: int = 1) -> tuple[float, float, object]:
        """Least seconds of `repeats` calls, GiB that they took at their peak (0 on a CPU), and the last result."""
        on_gpu = self.device.type == "cuda"
        seconds, result = [], None
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        for _ in range(repeats):
            began = time.perf_counter()
            result = work()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else 0.0
        return min(seconds), peak, result

    # ---- ours ----

    def rollout(self, branches: tuple[int, int], thought: int, answer: int) -> tuple[list[RolloutTree], Features]:
        """Trees of fixed lengths and the images' features, from a cold start: images are encoded too."""
        config = RolloutConfig(
            num_thoughts=branches[0],
            num_answers=branches[1],
            max_thought_length=thought,
            max_answer_length=answer,
            ignore_eos=True,
        )
        vlm = self.vlm("sdpa")
        with torch.no_grad():
            features = vlm.encode(self.prompts)
            draw = sampler(config, torch.Generator(self.device).manual_seed(1))
            trees = Engine(vlm, config).rollout(self.prompts, features, draw)
        joined = join_features(features)
        assert joined is not None
        return trees, joined

    def update(self, vlm: VLM, row: TreePack, features: Features) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities and the gradients of their weighted sum."""
        logprobs = vlm.logprobs(row, features)
        loss = (logprobs * row.weights.to(self.device)).sum()
        return logprobs.detach(), list(torch.autograd.grad(loss, self.parameters))

    # ---- the unpacked pass ----

    def plain(self):
        self.model.set_attn_implementation({"text_config": "sdpa"})
        return self.model

    def inputs(self, prompt: Prompt, count: int) -> dict[str, Tensor]:
        ids = prompt.ids.to(self.device)[None].repeat(count, 1)
        pixels = {n: torch.cat([p] * count).to(self.device) for n, p in prompt.pixels.items()}
        kinds = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **pixels}

    def generate(self, branches: tuple[int, int]) -> None:
        """One sequence per answer, prompt and image repeated for each."""
        new = self.sizes.thought + self.sizes.answer
        with torch.inference_mode(), torch.autocast(self.device.type, self.autocast, self.autocast is not None):
            for prompt in self.prompts:
                inputs = self.inputs(prompt, branches[0] * branches[1])
                self.plain().generate(**inputs, do_sample=True, max_new_tokens=new, min_new_tokens=new)

    def unpacked_update(self, trees: Sequence[RolloutTree]) -> None:
        """Gradients of all answers' sequences, `micro_batch` at a time, images encoded as often."""
        model = self.plain()
        gradients: list[Tensor] | None = None
        for tree in trees:
            answers = [torch.cat([t.ids, t.bridge_ids, a.ids]) for t in tree.thoughts for a in t.answers]
            for part in torch.stack(answers).to(self.device).split(self.sizes.micro_batch):
                inputs = self.inputs(tree.prompt, len(part))
                inputs["input_ids"] = torch.cat([inputs["input_ids"], part], dim=1)
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                text = torch.zeros_like(part, dtype=torch.int)
                inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], text], dim=1)
                with torch.autocast(self.device.type, self.autocast, self.autocast is not None):
                    logits = model(**inputs, use_cache=False, logits_to_keep=part.shape[1] + 1).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1).float(), part.flatten(), reduction="sum")
                new = torch.autograd.grad(loss, self.parameters)
                gradients = list(new) if gradients is None else [a.add_(b) for a, b in zip(gradients, new, strict=True)]


def row_of(trees: Sequence[RolloutTree], branches: tuple[int, int]) -> TreePack:
    """The trees packed, every token with a weight of its own sign and size."""
    generator = torch.Generator().manual_seed(2)
    shapes = (branches[0],), branches
    signs = [torch.randn(shape, generator=generator) for shape in shapes]
    ones = [torch.ones(shape) for shape in shapes]
    return pack([with_weights(tree_segments(tree), *ones, *signs) for tree in trees])


def relative(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """|ours − theirs| / |theirs| over all tensors together."""
    difference = sum(float((a - b).float().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (difference / sum(float(b.float().square().sum()) for b in theirs)) ** 0.5


def check(bench: Bench) -> None:
    """Each backend against sdpa in float32: with bfloat16 arithmetic none may be twice as far off as sdpa itself."""
    branches = (3, 2)
    trees, features = bench.rollout(branches, thought=min(40, bench.sizes.thought), answer=min(20, bench.sizes.answer))
    row = row_of(trees, branches)
    logprobs, gradients = bench.update(bench.vlm("sdpa", exact=True), row, features)
    limits: tuple[float, float] | None = None
    print(f"\n{'backend':<16} {'max |Δ log-prob|':>17} {'mean':>9} {'gradient error':>15}   against sdpa in float32")
    for backend in bench.backends():
        vlm = bench.vlm(backend)
        if bench.trains(backend):
            got, got_gradients = bench.update(vlm, row, features)
            error = relative(got_gradients, gradients)
        else:
            with torch.no_grad():
                got = vlm.logprobs(row, features)
            error = float("nan")
        difference = (got - logprobs).abs()
        mean = float(difference.mean())
        limits = limits or (2 * mean + 1e-5, 2 * error + 1e-5)
        agrees = mean <= limits[0] and (error <= limits[1] or not bench.trains(backend))
        verdict = "agrees" if agrees else f"differs: allowed {limits[0]:.1e} and {limits[1]:.1e}"
        print(f"{backend:<16} {float(difference.max()):>17.2e} {mean:>9.1e} {error:>15.1e}   {verdict}", flush=True)
        if not agrees:
            bench.failed.append(backend)


def measure(bench: Bench, branches: tuple[int, int]) -> None:
    """Time and memory of the rollout, of the update under each backend, and of the unpacked pass."""
    sizes = bench.sizes
    sampled = sizes.prompts * branches[0] * (sizes.thought + branches[1] * sizes.answer)
    print(f"\nK={branches[0]} M={branches[1]}, {sizes.prompts} prompts of {len(bench.prompts[0].ids)} tokens")
    print(f"{'':<26} {'seconds':>9} {'tree tokens/s':>14} {'peak GiB':>9} {'× unpacked':>11}")

    def line(name: str, seconds: float, peak: float, unpacked: float) -> None:
        times = f"{unpacked / seconds:>11.1f}" if unpacked else f"{'':>11}"
        print(f"{name:<26} {seconds:>9.2f} {sampled / seconds:>14,.0f} {peak:>9.1f} {times}", flush=True)

    plain, plain_peak, _ = bench.timed(lambda: bench.generate(branches))
    line("rollout, unpacked", plain, plain_peak, 0)
    trees: list[RolloutTree] = []
    kept: list[Features] = []

    def grow() -> None:
        grown, features = bench.rollout(branches, sizes.thought, sizes.answer)
        trees[:], kept[:] = grown, [features]

    seconds, peak, _ = bench.timed(grow)
    line("rollout, tree", seconds, peak, plain)
    bench.unpacked_update(trees[:1])  # warms up
    plain, plain_peak, _ = bench.timed(lambda: bench.unpacked_update(trees))
    line("update, unpacked", plain, plain_peak, 0)
    row = row_of(trees, branches)
    for backend in filter(bench.trains, bench.backends()):
        vlm = bench.vlm(backend)

        def work(vlm: VLM = vlm) -> None:
            bench.update(vlm, row, kept[0])

        work()  # warms up and compiles
        seconds, peak, _ = bench.timed(work, repeats=2)
        line(f"update, {backend}", seconds, peak, plain)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs tiny sizes on the CPU")
    began = time.perf_counter()
    device = torch.device("cpu" if options.tiny else "cuda")
    bench = Bench(TINY if options.tiny else FULL, device)
    weights = sum(p.numel() for p in bench.model.parameters())
    kernel = varlen_kernel()
    name = "CPU" if options.tiny else torch.cuda.get_device_name()
    print(f"{name} · torch {torch.__version__} · {weights:,} weights · flash: {kernel[0] if kernel else 'no kernel'}")
    check(bench)
    for branches in bench.sizes.branches:
        measure(bench, branches)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if bench.failed:
        raise SystemExit(f"beyond tolerance: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
