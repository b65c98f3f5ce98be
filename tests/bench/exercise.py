"""GRPO against REINFORCE without a baseline: learning curves, gradient norms, and the noise of the gradient.

    python tests/bench/exercise.py runs/arithmetic config=configs/tiny_arithmetic.yaml [key=value…]

Prints three Markdown tables. The first two are read from the runs in the folder: accuracy on the held-out split at
each evaluation, and the gradient norms of all steps, means over seeds ± one sample standard deviation between them. The
third is measured with the frozen policy that the options describe. A step's gradient g has the norm of its mean, |G|,
and the trace of its covariance, tr(S); noise / signal = tr(S) / |G|². With steps of b and of B prompts, whose gradients
are means over prompts, the two follow from mean squared norms alone (arXiv 1812.06162, appendix A):

    |G|² = (B E|g_B|² - b E|g_b|²) / (B - b)        tr(S_b) = (E|g_b|² - E|g_B|²) / (1 - b / B)

Unlike the variance of a norm, noise / signal does not change when all advantages are multiplied by a number, to which
AdamW is blind as well. Its interval is of resamples of the steps, 95%.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pvariance

import numpy as np

from vlm_grpo.common.config import load_config
from vlm_grpo.common.processes import Processes
from vlm_grpo.runs.records import find_runs, mean, read_run, spread, variations
from vlm_grpo.train import Run, TrainConfig

LARGE = 16  # times the prompts of a step
STEPS = 96  # of the usual size; LARGE / 4 times fewer of the large one
RESAMPLES = 2000


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plus_minus(values: Sequence[float], digits: int = 3) -> str:
    return f"{mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def learning_curves(folder: Path, metric: str = "eval/accuracy") -> tuple[str, str]:
    """Tables of the held-out metric by step, and of gradient norms."""
    groups = variations([read_run(run) for run in find_runs([folder])])
    curves = {group.name: [run.evaluated("steps", metric) for run in group.runs] for group in groups}
    steps = next(iter(curves.values()))[0][0]
    rows = [
        [f"{step:.0f}", *(plus_minus([values[i] for _, values in curve]) for curve in curves.values())]
        for i, step in enumerate(steps)
    ]
    rows.append(["mean of all", *(plus_minus([values[1:].mean() for _, values in curve]) for curve in curves.values())])
    norms = {group.name: [run.column("grad_norm") for run in group.runs] for group in groups}
    facts = {"mean norm": np.mean, "variance of the norm": np.var, "deviation / mean": lambda x: np.std(x) / np.mean(x)}
    of_norms = [
        [name, *(plus_minus([float(fact(norm)) for norm in of_runs], 4) for of_runs in norms.values())]
        for name, fact in facts.items()
    ]
    return table(["step", *curves], rows), table(["gradient norm", *norms], of_norms)


def frozen_norms(argv: Sequence[str], advantage: str, prompts: int, steps: int) -> list[float]:
    """Gradient norms of steps that change nothing."""
    sizes = [f"prompts_per_step={prompts}", f"max_steps={steps}"]
    config = load_config(TrainConfig, [*argv, f"advantage={advantage}", *sizes, "learning_rate=0", "eval_split="])
    with Run(config, Processes()) as run:
        return [run.step(number).metrics["grad_norm"] for number in range(1, steps + 1)]


def signal_and_noise(small: Sequence[float], large: Sequence[float]) -> tuple[float, float]:
    """|G|² and the trace of the covariance of a small step's gradient, from the norms of small and large steps.

    Gradients of 1 + noise of variance 3, and of 1 + noise of variance 3 / 16:

    >>> signal_and_noise([2.0], [math.sqrt(1 + 3 / 16)])
    (1.0, 3.0)
    """
    small_square, large_square = (fmean(norm * norm for norm in norms) for norms in (small, large))
    signal = (LARGE * large_square - small_square) / (LARGE - 1)
    return round(signal, 9), round((small_square - large_square) / (1 - 1 / LARGE), 9)


def noise_row(argv: Sequence[str], advantage: str, prompts: int) -> list[str]:
    """The third table's row of one kind of advantage."""
    small = frozen_norms(argv, advantage, prompts, STEPS)
    large = frozen_norms(argv, advantage, prompts * LARGE, STEPS * 4 // LARGE)
    signal, noise = signal_and_noise(small, large)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        part, whole = (list(rng.choice(norms, len(norms))) for norms in (small, large))
        square, trace = signal_and_noise(part, whole)
        ratios.append(trace / square if square > 0 else math.inf)
    low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
    numbers = [f"{value:.4f}" for value in (fmean(small), pvariance(small), math.sqrt(max(0.0, signal)), noise)]
    return [advantage, *numbers, f"{noise / signal:.1f} ({low:.1f} to {high:.1f})"]


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    if not argv or "=" in argv[0]:
        raise SystemExit(__doc__)
    folder, *options = argv
    prompts = load_config(TrainConfig, options).prompts_per_step
    print(*learning_curves(Path(folder)), sep="\n\n")
    header = ["frozen policy", "mean norm", "variance of the norm", "norm of the mean", "tr(S)", "noise / signal"]
    rows = [noise_row(options, advantage, prompts) for advantage in ("grpo", "reinforce")]
    print(f"\n{table(header, rows)}")


if __name__ == "__main__":
    main(sys.argv[1:])
