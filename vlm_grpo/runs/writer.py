"""What a run leaves for its reader: metrics, rollouts, a progress line and a before/after table. Rank 0 only.

output_dir/metrics.jsonl                  one JSON object per line: "step" and the metrics of that moment
output_dir/tensorboard/                   the same for TensorBoard
output_dir/rollouts/step-NNNNNN.parquet   one row per answer of the step
"""

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.tensorboard import SummaryWriter

from vlm_grpo.algorithm.stats import RolloutRow
from vlm_grpo.common.errors import UserError


class MetricsWriter:
    """Appends metrics to metrics.jsonl and TensorBoard. Use as a context manager, or call `close`."""

    def __init__(self, output_dir: Path, resumed_step: int | None = None):
        """`resumed_step`: TensorBoard forgets what a killed run wrote after that step."""
        self._path = output_dir / "metrics.jsonl"
        purge_step = None if resumed_step is None else resumed_step + 1
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a row is in the file at once, and one that the disk refused is not tried again on closing
            self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the writer is
            self._tensorboard = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)
        except OSError as error:
            raise UserError(f"cannot write in {output_dir}: {error.strerror or error} (output_dir)") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; JSON has no NaN or infinity, so these become null."""
        row = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        try:
            line = (json.dumps({"step": step, **row}) + "\n").encode()
            if self._lines.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, step)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error} (output_dir)") from error

    def close(self) -> None:
        self._lines.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_rollouts(output_dir: Path, step: int, rows: Sequence[RolloutRow]) -> Path:
    """Write the step's rollouts, whole or not at all; each reward part is a column `rewards/{part}`."""
    folder = output_dir / "rollouts"
    path = folder / f"step-{step:06}.parquet"
    aside = folder / f".{path.name}.writing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(_rollout_table(step, rows), aside)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror or error} (output_dir)") from error
    return path


def _rollout_table(step: int, rows: Sequence[RolloutRow]) -> pa.Table:
    texts = ("task", "sample_id", "prompt", "thought", "answer", "model_answer")
    numbers = ("reward", "thought_advantage", "answer_advantage")
    columns = {"step": pa.array([step] * len(rows), pa.int64())}
    columns |= {name: pa.array([_utf8(getattr(row, name)) for row in rows], pa.string()) for name in texts}
    columns |= {name: pa.array([getattr(row, name) for row in rows], pa.float64()) for name in numbers}
    for part in sorted({part for row in rows for part in row.parts}):
        columns[f"rewards/{part}"] = pa.array([row.parts.get(part) for row in rows], pa.float64())
    return pa.table(columns)


def _utf8(text: str) -> str:
    """The text with lone surrogates, which a sampled answer may hold, replaced: parquet is UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def eval_metrics(of_tasks: Mapping[str, Mapping[str, float]], num_tasks: int) -> dict[str, float]:
    """Metrics of an evaluation by the names that a run records: eval/METRIC, or eval/TASK/METRIC of several tasks.

    >>> eval_metrics({"sums": {"exact": 0.5}}, 1), eval_metrics({"sums": {"exact": 0.5}}, 2)
    ({'eval/exact': 0.5}, {'eval/sums/exact': 0.5})
    """
    return {
        f"eval/{name}/{metric}" if num_tasks > 1 else f"eval/{metric}": value
        for name, metrics in of_tasks.items()
        for metric, value in metrics.items()
    }
