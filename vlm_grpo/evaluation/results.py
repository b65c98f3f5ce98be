"""What an evaluation leaves for its reader: files of each task and split, and one table over all of them.

FOLDER/metrics.json        metrics, "intervals" (95%, by metric) and "notes" on how they were made
FOLDER/predictions.jsonl   one answer per line
FOLDER/evaluation.yaml     the options
FOLDER/made_from.json      what the answers depend on, by which the next evaluation knows whose results these are
FOLDER/…                   files in the benchmark's own format, where the task has one
summary.json, summary.md   the table over all tasks and splits
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlm_grpo.common.atomic import write_whole
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.tables import aligned
from vlm_grpo.evaluation.bootstrap import Interval
from vlm_grpo.evaluation.measure import Evaluation, sample_ids, take
from vlm_grpo.evaluation.predictions import MADE_FROM, predictions_bytes
from vlm_grpo.task.interface import Samples, TaskAdapter, describe, task_name

OWN_FILES = ("metrics.json", "predictions.jsonl", "evaluation.yaml", MADE_FROM, "summary.json", "summary.md")


@dataclass(frozen=True)
class Row:
    """One number of the table over all tasks and splits."""

    task: str
    split: str
    metric: str
    value: float | None  # None: no sample has it
    interval: tuple[float, float] | None
    num_samples: int
    decoding: str


def official_files(adapter: TaskAdapter, samples: Samples, evaluation: Evaluation) -> dict[str, bytes]:
    """The task's files in its benchmark's format, of the first answer to each sample."""
    first: dict[str, str] = {}
    for prediction in evaluation.predictions:
        first.setdefault(prediction.id, prediction.answer)
    chosen = [i for i, key in enumerate(sample_ids(samples)) if key in first]
    given = take(samples, chosen)
    where = f"task {task_name(adapter)}: official_files()"
    try:
        files = adapter.official_files(given, [first[key] for key in sample_ids(given)])
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(f"{where} raised {describe(error)}") from error
    for name, content in files.items():
        if not isinstance(content, bytes) or Path(name).name != name or name in OWN_FILES:
            raise UserError(
                f"{where} gave {type(content).__name__} for the file {name!r}; it must map plain file names, other "
                f"than {', '.join(OWN_FILES)}, to bytes"
            )
    return files


def write_evaluation(
    folder: Path,
    evaluation: Evaluation,
    found: Mapping[str, Interval],
    notes: Mapping[str, str],
    facts: Mapping[str, Any],
    config_yaml: str,
    files: Mapping[str, bytes],
) -> None:
    """Write all files of one task and split, each whole or not at all."""
    metrics = {name: _json_number(value) for name, value in evaluation.metrics.items()}
    spans = {name: [_json_number(i.low), _json_number(i.high)] for name, i in found.items()}
    content = {**metrics, "intervals": spans, "notes": dict(notes)}
    write_files(
        folder,
        {
            MADE_FROM: (json.dumps(facts, indent=1) + "\n").encode(),
            **files,
            "predictions.jsonl": predictions_bytes(evaluation.predictions),
            "metrics.json": (json.dumps(content, indent=1) + "\n").encode(),
            "evaluation.yaml": config_yaml.encode(),
        },
    )


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, each whole or not at all. Raises: UserError where the disk or the folder refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise UserError(f"output_dir={folder}: it cannot be written: {error}") from error


def rows_of(
    task: str, split: str, headline: str, evaluation: Evaluation, found: Mapping[str, Interval], decoding: str
) -> list[Row]:
    """The numbers of a task and split that stand in the table: the headline, and what only several answers have."""
    metrics = evaluation.metrics
    several = [name for name in metrics if name.startswith(("pass@", "tree_pass@", "maj@", "tree_maj@"))]
    rows = []
    reward = ["reward"] if several and "reward" in metrics else []
    for name in dict.fromkeys([headline, *reward, *several]):
        span = (found[name].low, found[name].high) if name in found else None
        value = metrics.get(name)
        rows.append(Row(task, split, name, value, span, int(metrics["num_samples"]), decoding))
    return rows


def metrics_table(metrics: Mapping[str, float], found: Mapping[str, Interval]) -> str:
    """One metric a line, with its interval where it has one.

    >>> print(metrics_table({"reward": 0.25, "num_samples": 4}, {"reward": Interval(0.125, 0.5, 1000)}))
    reward       0.2500  [0.1250, 0.5000]
    num_samples  4.0000
    """
    spans = {name: f"  [{interval.low:.4f}, {interval.high:.4f}]" for name, interval in found.items()}
    return aligned([(name, f"{value:.4f}{spans.get(name, '')}") for name, value in metrics.items()], "<")


HEADER = ("task", "split", "samples", "metric", "value", "95% interval", "decoding")


def _cells(row: Row) -> tuple[str, ...]:
    value = "none" if row.value is None else f"{row.value:.4f}"
    span = "" if row.interval is None else f"[{row.interval[0]:.4f}, {row.interval[1]:.4f}]"
    return row.task, row.split, str(row.num_samples), row.metric, value, span, row.decoding


def console_table(rows: Sequence[Row]) -> str:
    """The table for a terminal, in aligned columns."""
    return aligned([HEADER, *map(_cells, rows)], "<")


def markdown_table(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def check_table(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if the folder has a table of tasks and splits that are not among these."""
    try:
        saved = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["notes"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if others := [name for name in saved if name not in names]:
        raise UserError(
            f"output_dir={folder}: the table there, summary.json, is of {', '.join(others)} too, and would be replaced "
            f"by one of {', '.join(names)}: set another output_dir, or delete that folder"
        )


def write_summary(folder: Path, rows: Sequence[Row], notes: Mapping[str, str]) -> None:
    """Write summary.json and summary.md; `notes` say, for each task and split, how its numbers were made."""
    items = [{**asdict(row), "value": None if row.value is None else _json_number(row.value)} for row in rows]
    said = "\n".join(f"- {name}: {note}" for name, note in notes.items())
    write_files(
        folder,
        {
            "summary.json": (json.dumps({"rows": items, "notes": dict(notes)}, indent=1) + "\n").encode(),
            "summary.md": f"{markdown_table(rows)}\n\n{said}\n".encode(),
        },
    )


def _json_number(value: float) -> float | None:
    """The number, or None for what JSON cannot say."""
    return value if math.isfinite(value) else None
