"""How a step's time follows its work: against plain passes over as many tokens, and as P, K, M, T, images and prompts
grow, ours and TRL's.

    OMP_NUM_THREADS=2 python tests/bench/scaling.py --json scaling.json --plot growth.png

Same model and workload as versus_trl.py's largest setting, float32 on the CPU, all weights train. "Floor" is the plain
model: one ordinary causal forward and backward over as many tokens as the packed trees have, and one ordinary forward
of as many new tokens on a cache as long, with attention and cache of transformers' own. The trees T4A1, T4A4 and T16A1
are compared with the vision tower trained and frozen. Growth starts from one prompt of 400 image tokens and K = M = 4
branches of 64 + 16 tokens; both sides run as in versus_trl.py, the peer with micro-batches of 8, the best size there.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from versus_trl import (  # noqa: E402
    SETTINGS,
    Setting,
    bench_model,
    compare,
    our_trainer,
    timed_steps,
    write_workload,
)

BASE = SETTINGS["400-128+32-4"]
TREES = {"T4A1": (4, 1), "T4A4": (4, 4), "T16A1": (16, 1)}  # thoughts, answers per thought


class Bench:
    """One random model on disk, and steps of our trainer on it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.suppressed = bench_model(folder / "model")

    def trainer(self, setting: Setting, **options):
        """Our trainer and the step's samples."""
        path = write_workload(self.folder, setting, self.suppressed, self.options)
        return our_trainer(self.folder / "model", json.loads(path.read_text()), **options)

    def step(self, setting: Setting, **options) -> dict[str, float]:
        """Median seconds of rollout, update and step."""
        trainer, samples = self.trainer(setting, **options)
        rollout_s, update_s = timed_steps(trainer, samples, self.options.steps, lambda: None)
        rollout, update = statistics.median(rollout_s), statistics.median(update_s)
        return {"rollout_s": rollout, "update_s": update, "step_s": rollout + update}


def median_seconds(work, repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def update_over_floor(bench: Bench) -> dict[str, float]:
    """The update of one tree with a frozen tower, over a plain pass of the text model on as many tokens."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForImageTextToText

    trainer, samples = bench.trainer(replace(BASE, num_prompts=1))
    trainer.row_update.tower_trains = False
    graded = []
    backward = trainer.backward

    def keep(batch, on_policy):
        graded.extend(batch)
        return backward(batch, on_policy)

    trainer.backward = keep
    trainer.step(1, samples)
    ours = median_seconds(lambda: backward(graded[:1], on_policy=False), bench.options.steps + 2)
    tree = graded[0].scored.tree
    tokens = len(tree.prompt.ids) + tree.num_sampled + sum(len(t.bridge_ids) - len(t.answers) for t in tree.thoughts)
    plain = AutoModelForImageTextToText.from_pretrained(bench.folder / "model", dtype=torch.float32)
    ids = torch.randint(5, 100, (1, tokens))
    keep_positions = torch.arange(tokens - tree.num_sampled, tokens)

    def floor() -> None:
        logits = plain(input_ids=ids, use_cache=False, logits_to_keep=keep_positions).logits[0]
        F.cross_entropy(logits, ids[0, keep_positions]).backward()

    floor_s = median_seconds(floor, bench.options.steps + 2)
    return {"ours_s": ours, "floor_s": floor_s, "ratio": ours / floor_s, "tokens": tokens}


def decode_over_floor(bench: Bench) -> dict[str, float]:
    """A decoding step in the middle of a rollout (all branches are answers), over a plain forward of as many tokens."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.cache_utils import DynamicCache

    from vlm_grpo.rollout.engine import _Decoder

    trainer, samples = bench.trainer(BASE)
    seconds: list[tuple[int, float, int]] = []
    plain_step = _Decoder.step

    def timed(self, trees) -> None:
        start = time.perf_counter()
        plain_step(self, trees)
        used = max(tree.used for tree in trees if tree is not None)
        live = max(sum(len(feed.then) for feed in tree.feeds) for tree in trees if tree is not None)
        seconds.append((live, time.perf_counter() - start, used))

    _Decoder.step = timed
    trainer.step(1, samples)
    _Decoder.step = plain_step
    full = [s for s in seconds if s[0] == 16]  # K·M branches of every batch slot
    live, _, used = full[len(full) // 2]
    ours = statistics.median(s[1] for s in full)
    model = AutoModelForImageTextToText.from_pretrained(bench.folder / "model", dtype=torch.float32).eval()
    slots = BASE.num_prompts
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.randint(5, 100, (slots, used)), use_cache=True, cache=cache, logits_to_keep=1)
        ids = torch.randint(5, 100, (slots, live))

        def floor() -> None:
            model(input_ids=ids, cache=cache, use_cache=True)
            cache.crop(-live)

        floor_s = median_seconds(floor, 8)
    return {"ours_s": ours, "floor_s": floor_s, "ratio": ours / floor_s, "new_tokens": slots * live, "cache": used}


def tree_times(bench: Bench) -> dict[str, dict]:
    """Steps of three shapes of tree, with the tower trained and frozen, and the ratios of their times."""
    report: dict[str, dict] = {}
    for tower, is_frozen in (("trained", False), ("frozen", True)):
        steps = {}
        for name, (thoughts, answers) in TREES.items():
            setting = replace(BASE, num_thoughts=thoughts, num_answers=answers)
            steps[name] = bench.step(setting, freeze_vision=is_frozen)
            print(f"tower {tower}, {name}: {rounded(steps[name])}", flush=True)
        seconds = {name: figures["step_s"] for name, figures in steps.items()}
        ratios = {f"T4A4/{other}": seconds["T4A4"] / seconds[other] for other in ("T4A1", "T16A1")}
        print(f"tower {tower}: {rounded(ratios)}", flush=True)
        report[tower] = {**steps, **ratios}
    return report


GROWTH_BASE = replace(BASE, thought_tokens=64, answer_tokens=16, num_prompts=1)
GROWTH: dict[str, dict[int, Setting]] = {
    "image tokens": {side**2: replace(GROWTH_BASE, image_side=side) for side in (10, 20, 30)},
    "thoughts K": {n: replace(GROWTH_BASE, num_thoughts=n) for n in (2, 4, 8)},
    "answers M": {n: replace(GROWTH_BASE, num_answers=n) for n in (1, 4, 8)},
    "thought tokens T": {n: replace(GROWTH_BASE, thought_tokens=n) for n in (32, 64, 128)},
    "images of 100 tokens": {n: replace(GROWTH_BASE, image_side=10, images_per_prompt=n) for n in (1, 2, 4)},
    "prompts": {n: replace(GROWTH_BASE, num_prompts=n) for n in (1, 2, 4)},
}


def growth(bench: Bench) -> list[dict]:
    """Seconds and peak memory of a step of both sides as one quantity grows and the others stay."""
    known: dict[Setting, dict] = {}
    report = []
    for name, settings in GROWTH.items():
        for value, setting in settings.items():
            if setting not in known:
                workload = write_workload(bench.folder, setting, bench.suppressed, bench.options)
                known[setting] = compare(f"{name} = {value}", setting, bench.folder, workload, bench.options)
            report.append({"grows": name, "value": value, **{side: known[setting][side] for side in ("ours", "peer")}})
    return report


def growth_table(rows: list[dict]) -> str:
    """Markdown, a row per point."""
    lines = ["| grows | value | ours, s | TRL, s | ours, MiB | TRL, MiB |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{row[side]['step_s']:.2f}" for side in ("ours", "peer"))
        memory = " | ".join(f"{row[side]['memory_mib']:.0f}" for side in ("ours", "peer"))
        lines.append(f"| {row['grows']} | {row['value']} | {times} | {memory} |")
    return "\n".join(lines)


def plot_growth(rows: list[dict], path: Path) -> None:
    """Time above, memory below, a column for each quantity that grows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["grows"] for row in rows))
    figure, axes = pyplot.subplots(2, len(names), figsize=(2.4 * len(names), 4.6), squeeze=False)
    for column, name in enumerate(names):
        points = [row for row in rows if row["grows"] == name]
        for ax, key, label in zip(axes[:, column], ("step_s", "memory_mib"), ("step, s", "memory, MiB"), strict=True):
            for side, title, colour in (("ours", "vlm-grpo", "C0"), ("peer", "TRL 1.16", "C1")):
                values = [row["value"] for row in points]
                ax.plot(values, [row[side][key] for row in points], "o-", label=title, color=colour)
            ax.set_ylim(bottom=0)
            ax.set_xlabel(name)
            if column == 0:
                ax.set_ylabel(label)
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps after one warm-up step")
    parser.add_argument(
        "--parts", nargs="+", choices=("floors", "trees", "growth"), default=("floors", "trees", "growth")
    )
    parser.add_argument("--peer-python", type=Path, help="interpreter that has trl 1.16.0 (default: .bench-venv's)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the growth of time and memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.gradient_checkpointing, options.micro_batches, options.peer_only = False, (8,), False
    import torch

    torch.set_num_threads(options.threads)
    report: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        if "floors" in options.parts:
            report |= {"update": update_over_floor(bench), "decode": decode_over_floor(bench)}
            for name in ("update", "decode"):
                print(name, rounded(report[name]), flush=True)
        if "trees" in options.parts:
            report["trees"] = tree_times(bench)
        if "growth" in options.parts:
            report["growth"] = growth(bench)
            print(growth_table(report["growth"]))
            if options.plot:
                plot_growth(report["growth"], options.plot)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
