"""Pictures of training runs, one function each; none where the runs have nothing to show."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vlm_grpo.algorithm.diagnostics import SPIKE
from vlm_grpo.runs.records import Axis, Curve, Variation, eval_curve, mean, training_curve

# Okabe and Ito's colours, which people with any colour vision tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#a6761d")
DASHES = ("-", "--", ":", "-.")
AXES: tuple[tuple[Axis, str], ...] = (
    ("steps", "steps"),
    ("seconds", "training time, s"),
    ("tokens", "sampled tokens"),
)
CurveOf = Callable[[Variation], Curve | None]


@dataclass(frozen=True)
class Picture:
    """A figure, the stem of its file's name, and what it shows."""

    name: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG file, which names no program and no address."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
        return buffer.getvalue()


def pictures(variations: Sequence[Variation], eval_metrics: Sequence[str], window: int) -> list[Picture]:
    """All pictures that the runs have something for, in the order of a report."""
    every = [
        _rewards(variations, window),
        *(_accuracy(variations, metric, number) for number, metric in enumerate(eval_metrics, start=1)),
        _gradient_norms(variations, window),
        _variances(variations, window),
        _silent_groups(variations, window),
        _phases(variations),
        _terms(variations),
        _ranks(variations),
    ]
    return [picture for picture in every if picture is not None]


def _rewards(variations: Sequence[Variation], window: int) -> Picture | None:
    figure, panels = _panels(len(AXES))
    drawn = False
    for panel, (axis, label) in zip(panels, AXES, strict=True):

        def curve(variation: Variation, axis: Axis = axis) -> Curve | None:
            return training_curve(variation, "reward", axis, window)

        drawn |= _draw(panel, variations, curve)
        panel.set_xlabel(label)
    panels[0].set_ylabel("reward")
    _legend(panels[0])
    caption = f"Reward in training, mean of the last {window} steps. {BAND}"
    return Picture("reward", caption, figure) if drawn else None


def _accuracy(variations: Sequence[Variation], metric: str, number: int) -> Picture | None:
    figure, panels = _panels(len(AXES))
    drawn = False
    for panel, (axis, label) in zip(panels, AXES, strict=True):

        def curve(variation: Variation, axis: Axis = axis) -> Curve | None:
            return eval_curve(variation, metric, axis)

        drawn |= _draw(panel, variations, curve, marker="o")
        panel.set_xlabel(label)
    panels[0].set_ylabel(_shown(metric))
    _legend(panels[0])
    caption = f"{metric}: greedy answers to the held-out split. {BAND}"
    return Picture("accuracy" if number == 1 else f"accuracy_{number}", caption, figure) if drawn else None


def _gradient_norms(variations: Sequence[Variation], window: int) -> Picture | None:
    figure, (norms, scores) = _panels(2)
    drawn = _draw(norms, variations, lambda v: training_curve(v, "grad_norm", "steps", 1))
    for number, variation in enumerate(variations):
        for run in variation.runs:
            steps, values, score = run.along("steps"), run.column("grad_norm"), run.spike_scores
            colour = _colour(number)
            spikes = np.nan_to_num(score) > SPIKE
            norms.plot(steps[spikes], values[spikes], linestyle="none", marker="^", color=colour)
            known = np.nan_to_num(score) > 0
            scores.plot(steps[known], score[known], ".", markersize=3, alpha=0.6, color=colour)
    norms.set_ylabel("gradient norm before clipping")
    scores.set_ylabel("spike score")
    scores.axhline(SPIKE, color="grey", linewidth=0.8)
    has_gradient = any((run.column("grad_norm") > 0).any() for v in variations for run in v.runs)
    for panel in (norms, scores):
        panel.set_yscale("log" if has_gradient else "linear")
        panel.set_xlabel("steps")
    _legend(norms)
    caption = (
        f"Gradient norm, with a triangle at every step whose spike score is above {SPIKE:g}; and the spike scores of "
        f"all runs: the norm over the mean norm so far (arXiv 2501.06842). {BAND}"
    )
    return Picture("gradient_norms", caption, figure) if drawn else None


def _variances(variations: Sequence[Variation], window: int) -> Picture | None:
    names = {
        "reward_between_thoughts": "variance between thoughts",
        "reward_within_thoughts": "variance within thoughts",
        "reward_variance_ratio": "within / between",
    }
    caption = (
        f"The two parts of the reward's variance within a question, and their ratio; mean of the last {window} steps. "
        f"One answer for each thought has no variance within it. {BAND}"
    )
    return _training(variations, "variances", names, caption, window)


def _silent_groups(variations: Sequence[Variation], window: int) -> Picture | None:
    names = {
        "frac_reward_zero_std": "questions with equal answers",
        "frac_thought_zero_std": "questions with equal thoughts",
    }
    caption = (
        "Share of the questions whose answers, or whose thoughts, all earned the same, so that they teach nothing; "
        f"mean of the last {window} steps. {BAND}"
    )
    return _training(variations, "silent_groups", names, caption, window)


def _terms(variations: Sequence[Variation]) -> Picture | None:
    names = {
        "grad_norm/thoughts": "gradient norm, thoughts",
        "grad_norm/answers": "gradient norm, answers",
        "grad_cosine": "cosine between them",
    }
    caption = f"The gradient's two terms, where `diagnostics_every` looked at them. {BAND}"
    return _training(variations, "gradient_terms", names, caption, 1)


def _ranks(variations: Sequence[Variation]) -> Picture | None:
    kinds = ("grad_rank/", "grad_matrix_rank/", "grad_sparsity/")
    logged = dict.fromkeys(name for v in variations for run in v.runs for row in run.trained for name in row)
    layers = dict.fromkeys(name.partition("/")[2] for name in logged if name.startswith(kinds))
    names = {f"{kind}{layer}": f"{kind.rstrip('/')}\n{layer[-36:]}" for layer in [*layers][:4] for kind in kinds}
    caption = (
        "Of the layers of `diagnostics_layers` (the first four): effective rank of the trees' gradients as rows, of a "
        f"tree's gradient as the layer's matrix, and share of entries that are nearly 0. {BAND}"
    )
    return _training(variations, "gradient_ranks", names, caption, 1, columns=3) if names else None


def _phases(variations: Sequence[Variation]) -> Picture | None:
    logged = dict.fromkeys(name for v in variations for run in v.runs for row in run.trained for name in row)
    # What a rollout is made of stands for it
    names = [name for name in logged if name.startswith("time/") and name not in ("time/rollout", "time/diagnostics")]
    if not names:
        return None
    figure = Figure(figsize=(9, 1.4 + 0.45 * len(variations)), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    left = np.zeros(len(variations))
    for number, name in enumerate(names):
        seconds = np.nan_to_num([mean(mean(run.column(name)) for run in v.runs) for v in variations])
        panel.barh(
            np.arange(len(variations)), seconds, left=left, label=name.removeprefix("time/"), color=_colour(number)
        )
        left = left + seconds
    panel.set_yticks(np.arange(len(variations)), [_shown(v.name) for v in variations])
    panel.invert_yaxis()
    panel.set_xlabel("seconds per step")
    panel.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return Picture("phases", "Where the time of a step goes, mean over steps and runs.", figure)


BAND = "Line: mean over seeds; band: one standard deviation on each side."


def _training(
    variations: Sequence[Variation],
    name: str,
    metrics: dict[str, str],
    caption: str,
    window: int,
    columns: int | None = None,
) -> Picture | None:
    """One panel for each metric of the training steps, along the steps."""
    figure, panels = _panels(len(metrics), columns)
    drawn = False
    for panel, (metric, label) in zip(panels, metrics.items(), strict=True):

        def curve(variation: Variation, metric: str = metric) -> Curve | None:
            return training_curve(variation, metric, "steps", window)

        drawn |= _draw(panel, variations, curve)
        panel.set_xlabel("steps")
        panel.set_ylabel(_shown(label))
    _legend(panels[0])
    return Picture(name, caption, figure) if drawn else None


def _panels(count: int, columns: int | None = None) -> tuple[Figure, list[Axes]]:
    columns = columns or count
    rows = -(-count // columns)
    figure = Figure(figsize=(max(6.5, 4.2 * columns), 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, 1 + number) for number in range(count)]
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _draw(panel: Axes, variations: Sequence[Variation], curve_of: CurveOf, marker: str = "") -> bool:
    """Draw each variation's curve with its band; whether there was any."""
    drawn = False
    for number, variation in enumerate(variations):
        curve = curve_of(variation)
        if curve is None:
            continue
        drawn = True
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        alone = marker or ("." if len(curve.x) == 1 else "")
        panel.plot(
            curve.x, curve.mean, dash, color=_colour(number), marker=alone, markersize=4, label=_shown(variation.name)
        )
        panel.fill_between(curve.x, curve.low, curve.high, color=_colour(number), alpha=0.15, linewidth=0)
    return drawn


def _shown(text: str) -> str:
    """The text as it is: matplotlib reads mathematics between dollars, and hides labels that begin with "_"."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    if labels:
        panel.legend(handles, labels, fontsize="small", frameon=False)
