"""A report on training runs: pictures as PNG and one HTML page that holds them all and asks nothing of the network.

    python -m vlm_grpo.report runs/branching
    python -m vlm_grpo.report runs/seed-0 runs/seed-1 runs/seed-2 out=report metric=eval/iou

FOLDER… are output folders of runs, or folders that hold such; runs that differ by their seed alone are one variation.
"""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vlm_grpo.common.atomic import write_whole
from vlm_grpo.common.config import load_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.common.tables import aligned
from vlm_grpo.runs.figures import Picture, pictures
from vlm_grpo.runs.records import (
    RunRecord,
    Variation,
    eval_metrics,
    find_runs,
    mean,
    median,
    read_run,
    spread,
    variations,
)

PAGE = "report.html"


@dataclass
class ReportConfig:
    """A report on training runs; their folders stand before these options."""

    # Folder of the report; none: FOLDER/report for one FOLDER, else report
    out: str | None = None
    # Metric of the held-out split that is drawn against steps, time and tokens; none: each task's headline
    metric: str | None = None
    # Steps over which curves of training metrics are averaged; none: a twentieth of the longest run
    window: Annotated[int | None, Range(at_least=1)] = None


@dataclass(frozen=True)
class TableRow:
    """What the final table says of a variation; each number is a mean over runs, with its standard deviation."""

    name: str
    num_runs: int
    num_steps: int  # of the shortest run
    reward: tuple[float, float]  # over the last tenth of the steps
    evaluated: list[tuple[float, float]]  # the last evaluation, by each metric
    step_seconds: tuple[float, float]  # median over a run's steps
    seconds: tuple[float, float]  # all steps of a run
    tokens: tuple[float, float]  # all sampled tokens of a run
    spike_share: tuple[float, float]  # GSS@10
    largest_spike: float  # of all runs


def table_row(variation: Variation, metrics: Sequence[str]) -> TableRow:
    """The table's numbers of one variation."""
    runs = variation.runs

    def over_runs(values: Sequence[float]) -> tuple[float, float]:
        return mean(values), spread(values)

    ends = [[run.evaluated("steps", metric)[1] for run in runs] for metric in metrics]
    scores = [score for run in runs for score in run.spike_scores if not math.isnan(score)]
    return TableRow(
        name=variation.name,
        num_runs=len(runs),
        num_steps=min(len(run.trained) for run in runs),
        reward=over_runs([run.final_reward for run in runs]),
        evaluated=[over_runs([float(values[-1]) for values in of_runs if len(values)]) for of_runs in ends],
        step_seconds=over_runs([median(run.step_seconds) for run in runs]),
        seconds=over_runs([float(run.along("seconds")[-1]) for run in runs]),
        tokens=over_runs([float(run.along("tokens")[-1]) for run in runs]),
        spike_share=over_runs([run.spike_share for run in runs]),
        largest_spike=max(scores, default=math.nan),
    )


def table_cells(rows: Sequence[TableRow], metrics: Sequence[str]) -> list[list[str]]:
    """The final table as text, its header first.

    >>> row = TableRow("T4A4", 2, 9, (0.5, 0.1), [(math.nan, math.nan)], (1.25, 0), (9, 0), (1e4, 0), (0, 0), 2.5)
    >>> table_cells([row], ["eval/iou"])[1]
    ['T4A4', '2', '9', '0.500 ± 0.100', '–', '1.25 ± 0.00', '9 ± 0', '10,000 ± 0', '0.0000 ± 0.0000', '2.5']
    """
    shown = [f"held-out {metric.removeprefix('eval/')}" for metric in metrics]
    header = ["variation", "seeds", "steps", "reward", *shown, "s / step", "s", "tokens", "GSS@10", "largest GSS"]
    cells = [header]
    for row in rows:
        cells.append([row.name, str(row.num_runs), str(row.num_steps), _pm(row.reward, ".3f")])
        cells[-1] += [_pm(pair, ".3f") for pair in row.evaluated]
        cells[-1] += [_pm(row.step_seconds, ".2f"), _pm(row.seconds, ",.0f")]
        cells[-1] += [_pm(row.tokens, ",.0f"), _pm(row.spike_share, ".4f"), _text(row.largest_spike, ".1f")]
    return cells


def _pm(pair: tuple[float, float], form: str) -> str:
    value, deviation = pair
    return _text(value, form) if math.isnan(deviation) else f"{_text(value, form)} ± {_text(deviation, form)}"


def _text(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


TABLE_NOTE = (
    "Means over seeds ± one standard deviation between them. Reward: over the last tenth of the steps. Held-out "
    "metric: the last evaluation. Seconds per step: median; seconds: all steps of a run; both without evaluations, "
    "saving and looks at the gradient. Tokens: sampled by a run, a thought counted once. GSS@10: share of optimiser "
    "steps whose gradient norm is above ten times its mean so far (arXiv 2501.06842)."
)


def page(shown: Sequence[Picture], cells: Sequence[Sequence[str]], groups: Sequence[Variation]) -> str:
    """The HTML page; images are inside it."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Training runs</title>',
        f"<style>{STYLE}</style></head><body><h1>Training runs</h1>",
        f"<table>{_html_row(cells[0], 'th')}{''.join(_html_row(row, 'td') for row in cells[1:])}</table>",
        f"<p>{html.escape(TABLE_NOTE)}</p>",
    ]
    for picture in shown:
        image = base64.b64encode(picture.png).decode("ascii")
        caption = html.escape(picture.caption)
        name = html.escape(picture.name.replace("_", " "))
        lines.append(f'<figure id="{picture.name}"><img alt="{name}" src="data:image/png;base64,{image}">')
        lines.append(f"<figcaption>{caption}</figcaption></figure>")
    lines.append(f"<h2>Runs</h2><ul>{''.join(_html_run(v, run) for v in groups for run in v.runs)}</ul>")
    return "\n".join([*lines, "</body></html>", ""])


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}"
    "th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}figure{margin:2em 0}img{max-width:100%}"
    "figcaption,p{color:#555;font-size:14px}"
)


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _html_run(variation: Variation, run: RunRecord) -> str:
    planned = run.options.get("max_steps")
    done = len(run.trained)
    state = f"{done} steps" if done == planned else f"{done} of {planned} steps"
    seed = run.options.get("seed")
    return f"<li>{html.escape(variation.name)}, seed {seed}: {html.escape(str(run.folder))}, {state}</li>"


def write_report(folders: Sequence[Path], config: ReportConfig) -> Path:
    """Read the runs, write the pictures and the page, print the table; gives back the page's path."""
    records = [record for folder in find_runs(folders) if (record := read_run(folder)).trained]
    if not records:
        raise UserError(f"{', '.join(map(str, folders))}: no run has finished a step yet")
    metrics = eval_metrics(records, config.metric)
    groups = variations(records)
    window = config.window or max(1, max(len(record.trained) for record in records) // 20)
    shown = pictures(groups, metrics, window)
    cells = table_cells([table_row(variation, metrics) for variation in groups], metrics)
    out = Path(config.out or (folders[0] / "report" if len(folders) == 1 else "report"))
    files = {f"{picture.name}.png": picture.png for picture in shown}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, PAGE: page(shown, cells, groups).encode()}.items():
            write_whole(out / name, content)
    except OSError as error:
        raise UserError(f"out={out}: it cannot be written: {error}") from error
    print(aligned(cells))
    return out / PAGE


def main(argv: Sequence[str]) -> None:
    """Report on the runs in the folders that are named."""
    named = [argument for argument in argv if "=" not in argument and not argument.startswith("-")]
    config = load_config(ReportConfig, [argument for argument in argv if argument not in named])
    if not named:
        raise UserError("name at least one folder: python -m vlm_grpo.report FOLDER…")
    print(f"written: {write_report([Path(name) for name in named], config)}")


if __name__ == "__main__":
    from vlm_grpo.common.program import run as run_program

    run_program(main)
