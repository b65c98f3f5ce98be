"""Metrics, rollouts and progress as their readers find them."""

import io
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlm_grpo.algorithm.stats import RolloutRow
from vlm_grpo.common.errors import UserError
from vlm_grpo.runs.changes import before_after_table
from vlm_grpo.runs.progress import Progress
from vlm_grpo.runs.writer import MetricsWriter, write_rollouts


def rows(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_lines_of_strict_json_and_reach_tensorboard(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5, "kl": math.nan, "rewards/iou/mean": 0.25})
        assert rows(tmp_path)[0]["reward"] == 0.5, "a row is in the file as soon as it is written"
        writer.write(2, {"reward": 0.75, "kl": math.inf})
    assert rows(tmp_path) == [
        {"step": 1, "reward": 0.5, "kl": None, "rewards/iou/mean": 0.25},
        {"step": 2, "reward": 0.75, "kl": None},
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [event.step for event in events.Scalars("rewards/iou/mean")] == [1]


def test_resumed_run_appends_and_tensorboard_forgets_later_steps(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward": step})
    with MetricsWriter(tmp_path, resumed_step=2) as writer:
        writer.write(3, {"reward": 30})
    assert [row["reward"] for row in rows(tmp_path)] == [1, 2, 3, 30]  # checkpoint.begin_run drops the old third row
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 1), (2, 2), (3, 30)]


def test_full_disk_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with MetricsWriter(tmp_path) as writer, pytest.raises(UserError, match=r"metrics.jsonl: No space left.*output_dir"):
        writer.write(1, {"reward": 0.5})
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / ".step-000001.parquet.writing").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"step-000001.parquet: .*No space left.*output_dir"):
        write_rollouts(tmp_path, 1, [ROW])
    assert not list((tmp_path / "rollouts").iterdir())


ROW = RolloutRow("scene-1", "Where?", "left", "[1, 2, 3, 4]", "[10, 20, 30, 40]", 0.5, 1.5, -0.5, {"iou": 0.5})


def test_rollouts_hold_a_column_for_each_part(tmp_path: Path) -> None:
    other = RolloutRow("scene-2", "What?", "", "", "\ud800é", None, 0.0, 0.0, {"format": 1.0})
    path = write_rollouts(tmp_path, 12, [ROW, other])
    assert path == tmp_path / "rollouts" / "step-000012.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    first, second = pq.read_table(path).to_pylist()
    assert first == {
        "step": 12,
        "task": "",
        "sample_id": "scene-1",
        "prompt": "Where?",
        "thought": "left",
        "answer": "[1, 2, 3, 4]",
        "model_answer": "[10, 20, 30, 40]",
        "reward": 0.5,
        "thought_advantage": 1.5,
        "answer_advantage": -0.5,
        "rewards/format": None,
        "rewards/iou": 0.5,
    }
    assert (second["reward"], second["model_answer"], second["rewards/format"]) == (None, "?é", 1.0)


def test_rollouts_of_no_answer_keep_their_columns(tmp_path: Path) -> None:
    table = pq.read_table(write_rollouts(tmp_path, 1, []))
    assert table.num_rows == 0 and "reward" in table.column_names


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_progress_is_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(total=10, headline="rewards/iou", start=4, stream=stream, every_s=5.0, clock=clock)
    for step in range(4, 10):
        clock.now += 2.0
        progress.update({"reward": step / 10, "rewards/iou": 0.25}, num_tokens=3000)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 5/10 · reward 0.400 · iou 0.250 · tokens/s 1,500 · 00:10 left",
        "step 8/10 · reward 0.700 · iou 0.250 · tokens/s 1,500 · 00:04 left",
        "step 10/10 · reward 0.900 · iou 0.250 · tokens/s 1,500 · 00:00 left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_a_bar() -> None:
    stream = Terminal()
    progress = Progress(total=2, headline="reward", stream=stream)
    progress.update({"reward": 0.5}, num_tokens=10)
    progress.say("a line of its own")
    progress.update({"reward": 0.625}, num_tokens=10)
    progress.close()
    shown = stream.getvalue()
    assert "2/2" in shown and "reward=0.625" in shown and "tokens/s=" in shown
    assert "a line of its own\n" in shown


def test_table_shows_metrics_that_only_one_side_has() -> None:
    table = before_after_table({"a": 0.5}, {"b": 0.25}, "b").splitlines()
    assert [line.split() for line in table[1:]] == [["b", "nan", "0.2500", "+nan"], ["a", "0.5000", "nan", "+nan"]]


def test_a_count_that_one_side_lacks_is_0() -> None:
    table = before_after_table({"a": 0.5, "num_without_reward": 3.0}, {"a": 0.5}, "a").splitlines()
    assert table[-1].split() == ["num_without_reward", "3.0000", "0.0000", "-3.0000"]
