"""How a step's time follows its work: against plain passes over as many tokens, and as P, K, M, T and prompts grow.

    OMP_NUM_THREADS=2 python tests/bench/scaling.py --json scaling.json

Same model and workload as versus_trl.py's largest setting, float32 on the CPU, all weights train. "Floor" is the plain
model: one ordinary causal forward and backward over as many tokens as the packed trees have, and one ordinary forward
of as many new tokens on a cache as long, with attention and cache of transformers' own.
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

from versus_trl import SETTINGS, Setting, bench_model, our_trainer, timed_steps, write_workload  # noqa: E402

BASE = SETTINGS["400-128+32-4"]
TREES = {"T4A1": (4, 1), "T4A4": (4, 4), "T16A1": (16, 1)}  # thoughts, answers per thought


class Bench:
    """One random model on disk, and steps of our trainer on it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.suppressed = bench_model(folder / "model")

    def trainer(self, setting: Setting, thoughts: int = 4, answers: int = 4):
        path = write_workload(self.folder, setting, self.suppressed, self.options)
        workload = json.loads(path.read_text())
        return our_trainer(self.folder / "model", workload, num_thoughts=thoughts, num_answers=answers)

    def step(self, setting: Setting, thoughts: int = 4, answers: int = 4) -> dict[str, float]:
        """Median seconds of rollout, update and step."""
        trainer = self.trainer(setting, thoughts, answers)
        rollout_s, update_s = timed_steps(trainer, self.options.steps, lambda: None)
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

    trainer = bench.trainer(replace(BASE, num_prompts=1))
    trainer.tower_trains = False
    graded = []
    backward = trainer.backward

    def keep(batch):
        graded.extend(batch)
        return backward(batch)

    trainer.backward = keep
    trainer.step(1, trainer.reader.tasks[""].samples("train"))
    ours = median_seconds(lambda: backward(graded[:1]), bench.options.steps + 2)
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

    from vlm_grpo.engine import _Growth

    trainer = bench.trainer(BASE)
    seconds: list[tuple[int, float, int]] = []
    plain_step = _Growth.step

    def timed(self, lanes) -> None:
        start = time.perf_counter()
        plain_step(self, lanes)
        used = max(lane.used for lane in lanes if lane is not None)
        live = max(sum(len(feed.then) for feed in lane.feeds) for lane in lanes if lane is not None)
        seconds.append((live, time.perf_counter() - start, used))

    _Growth.step = timed
    trainer.step(1, trainer.reader.tasks[""].samples("train"))
    _Growth.step = plain_step
    full = [s for s in seconds if s[0] == 16]  # K·M branches of every lane
    live, _, used = full[len(full) // 2]
    ours = statistics.median(s[1] for s in full)
    model = AutoModelForImageTextToText.from_pretrained(bench.folder / "model", dtype=torch.float32).eval()
    lanes = BASE.num_prompts
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.randint(5, 100, (lanes, used)), use_cache=True, cache=cache, logits_to_keep=1)
        ids = torch.randint(5, 100, (lanes, live))

        def floor() -> None:
            model(input_ids=ids, cache=cache, use_cache=True)
            cache.crop(-live)

        floor_s = median_seconds(floor, 8)
    return {"ours_s": ours, "floor_s": floor_s, "ratio": ours / floor_s, "new_tokens": lanes * live, "cache": used}


def growth(bench: Bench) -> list[dict]:
    """Step time as one quantity grows and the others stay at the base setting with one prompt."""
    one = replace(BASE, num_prompts=1)
    rows: list[tuple[str, int, Setting, int, int]] = []
    rows += [("image tokens", side**2, replace(one, image_side=side), 4, 4) for side in (10, 20, 30)]
    rows += [("K", k, one, k, 4) for k in (2, 4, 8)]
    rows += [("M", m, one, 4, m) for m in (1, 4, 8)]
    rows += [("T", t, replace(one, thought_tokens=t), 4, 4) for t in (64, 128, 256)]
    rows += [("prompts", n, replace(one, num_prompts=n), 4, 4) for n in (1, 2, 4)]
    report = []
    for name, value, setting, thoughts, answers in rows:
        figures = bench.step(setting, thoughts, answers)
        report.append({"grows": name, "value": value, **figures})
        times = ", ".join(f"{key} {seconds:.2f}" for key, seconds in figures.items())
        print(f"{name} = {value}: {times}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps after one warm-up step")
    parser.add_argument("--no-growth", action="store_true", help="leave the growth table out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.gradient_checkpointing = False
    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        report: dict = {"update": update_over_floor(bench), "decode": decode_over_floor(bench)}
        for name in ("update", "decode"):
            print(name, {key: round(value, 4) for key, value in report[name].items()}, flush=True)
        report["trees"] = {name: bench.step(BASE, *shape) for name, shape in TREES.items()}
        steps = {name: figures["step_s"] for name, figures in report["trees"].items()}
        print({name: round(seconds, 2) for name, seconds in steps.items()}, flush=True)
        report["T4A4/T4A1"] = steps["T4A4"] / steps["T4A1"]
        report["T4A4/T16A1"] = steps["T4A4"] / steps["T16A1"]
        print(f"T4A4/T4A1 {report['T4A4/T4A1']:.2f}, T4A4/T16A1 {report['T4A4/T16A1']:.2f}", flush=True)
        if not options.no_growth:
            report["growth"] = growth(bench)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
