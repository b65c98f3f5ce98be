"""The report says what the runs' files say: numbers worked out by hand, pictures that are there, no address to ask.

Letters: n steps of a run.
"""

import json
import math
import re
import struct
from base64 import b64decode
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vlm_grpo.common.config import resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.report import PAGE, ReportConfig, main, table_cells, table_row, write_report
from vlm_grpo.runs.figures import pictures
from vlm_grpo.runs.records import Variation, eval_curve, eval_metrics, find_runs, read_run, training_curve, variations
from vlm_grpo.train import TrainConfig

STEPS = 20
PICTURES = ("reward", "accuracy", "gradient_norms", "variances", "silent_groups", "phases")


def write_run(folder: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(parents=True)
    given = {"num_thoughts": 4, "num_answers": 1, "seed": 0, "max_steps": STEPS, "output_dir": str(folder)} | options
    (folder / "config.yaml").write_text(yaml.safe_dump(given))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made_rows(offset: float, seconds: float, spike_at: int | None = None) -> list[dict[str, Any]]:
    """Reward offset + step / 100, equal times and tokens, gradient norm 2, or 200 at one step; three evaluations."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval/acc": 0.1 + offset, "eval/num_samples": 8}]
    total, spikes = 0.0, 0
    for step in range(1, STEPS + 1):
        norm = 200.0 if step == spike_at else 2.0
        total += norm
        score = norm * step / total
        spikes += score > 10
        row = {"step": step, "reward": offset + step / 100, "grad_norm": norm, "num_tokens": 100.0}
        row |= {"step_time": seconds, "time/decode": seconds / 2, "time/update": seconds / 4, "time/rollout": seconds}
        row |= {"grad_spike_score": score, "grad_spike_share": spikes / step}
        row |= {"reward_between_thoughts": 0.02, "reward_within_thoughts": 0.01, "reward_variance_ratio": 0.5}
        row |= {"frac_reward_zero_std": 0.25, "frac_thought_zero_std": 0.5}
        if step % 10 == 0:
            row |= {"eval/acc": 0.1 + offset + step / 100, "eval/num_samples": 8}
        rows.append(row)
    return rows


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """T4A1 with two seeds, one of them with a spike in its last step; T4A4, twice as slow, with one."""
    write_run(tmp_path / "T4A1-seed-0", made_rows(0.1, 1.0))
    write_run(tmp_path / "T4A1-seed-1", made_rows(0.3, 3.0, spike_at=STEPS), seed=1)
    write_run(tmp_path / "T4A4-seed-0", made_rows(0.5, 4.0), num_answers=4)
    return tmp_path


class Page(HTMLParser):
    """What a browser would find: tags that are closed, images, cells of tables, and everything it would ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.images: list[bytes] = []
        self.requests: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data"):
                kind, _, data = (value or "").partition("base64,")
                self.images.append(b64decode(data, validate=True)) if kind == "data:image/png;" else None
                self.requests += [] if kind == "data:image/png;" else [value or ""]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} is closed, but is not the innermost tag"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", png[16:24])


@pytest.mark.slow
def test_page_holds_all_pictures_and_asks_for_nothing(grid: Path) -> None:
    path = write_report([grid], ReportConfig())
    assert path == grid / "report" / PAGE
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.requests == []
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link", re.sub(r"base64,[\w+/=]+", "", text))
    assert [image.split(b"IDAT")[0].count(b"http") for image in page.images] == [0] * len(PICTURES)
    for name, image in zip(PICTURES, page.images, strict=True):
        assert (path.parent / f"{name}.png").read_bytes() == image
        assert min(size_of(image)) >= 150
        assert f'id="{name}"' in text
    assert {file.name for file in path.parent.iterdir()} == {PAGE, *(f"{name}.png" for name in PICTURES)}


def test_table_holds_the_numbers_worked_out_by_hand(grid: Path) -> None:
    """Reward: the last two of 20 steps, 0.195 on average above the offset; 0.1 and 0.3 differ by 0.1414 around 0.2."""
    page = Page(write_report([grid], ReportConfig()).read_text(encoding="utf-8"))
    header, one, four = page.rows
    assert header[:5] == ["variation", "seeds", "steps", "reward", "held-out acc"]
    # The spike: 200 / ((19 * 2 + 200) / 20) = 16.8, in one of 20 steps of one of two runs
    assert one == [
        *("T4A1", "2", "20", "0.395 ± 0.141", "0.500 ± 0.141", "2.00 ± 1.41", "40 ± 28", "2,000 ± 0"),
        *("0.0250 ± 0.0354", "16.8"),
    ]
    assert four == ["T4A4", "1", "20", "0.695", "0.800", "4.00", "80", "2,000", "0.0000", "1.0"]


def test_curves_are_means_and_standard_deviations_of_runs(grid: Path) -> None:
    one, four = variations([read_run(folder) for folder in find_runs([grid])])
    steps = training_curve(one, "reward", "steps")
    assert steps is not None
    np.testing.assert_allclose(steps.x, np.arange(1, 21))
    np.testing.assert_allclose(steps.mean, 0.2 + np.arange(1, 21) / 100)
    np.testing.assert_allclose(steps.high - steps.low, 2 * math.sqrt(0.02))
    # One run takes 1 s a step and the other 3 s: they share the time from 3 s to 20 s, with steps t and t / 3
    time = training_curve(one, "reward", "seconds")
    assert time is not None
    assert (time.x[0], time.x[-1]) == (3.0, 20.0)
    np.testing.assert_allclose(time.mean, 0.2 + (time.x + time.x / 3) / 2 / 100)
    alone = training_curve(four, "reward", "tokens", window=4)
    assert alone is not None
    np.testing.assert_allclose(alone.x, 100 * np.arange(1, 21))
    np.testing.assert_allclose(alone.mean[3:], 0.5 + (np.arange(4, 21) - 1.5) / 100)
    np.testing.assert_allclose(alone.mean[:2], [0.51, 0.515])
    np.testing.assert_array_equal(alone.low, alone.high)
    accuracy = eval_curve(four, "eval/acc", "seconds")
    assert accuracy is not None
    np.testing.assert_allclose([accuracy.x, accuracy.mean], [[0, 40, 80], [0.6, 0.7, 0.8]])


def test_nulls_and_looks_at_the_gradient_enter_no_mean(tmp_path: Path) -> None:
    rows = made_rows(0.0, 1.0)
    for row in rows[1:]:
        row |= {"step_time": 6.0, "time/diagnostics": 5.0, "resampled_tokens": 50.0}
        if row["step"] % 2:
            row |= {"reward": None, "reward_variance_ratio": None, "grad_spike_score": None}
        else:
            row |= {"grad_norm/thoughts": 1.0, "grad_norm/answers": 2.0, "grad_cosine": 0.5}
            row |= {f"grad_{kind}/layers.0.weight": 1.5 for kind in ("rank", "matrix_rank", "sparsity")}
    run = read_run(write_run(tmp_path / "run", rows))
    [variation] = variations([run])
    row = table_row(variation, ["eval/acc"])
    assert row.step_seconds[0] == 1.0 and row.tokens[0] == 20 * 150
    assert row.reward[0] == pytest.approx(0.20), "of steps 19 and 20 only the latter has a reward"
    curve = training_curve(variation, "grad_cosine", "steps")
    assert curve is not None and curve.x.tolist() == [*range(2, 21, 2)]
    assert [p.name for p in pictures([variation], [], 1)][-2:] == ["gradient_terms", "gradient_ranks"]


def test_a_step_without_a_time_or_tokens_takes_the_mean_of_the_others(tmp_path: Path) -> None:
    rows = made_rows(0.0, 2.0)
    for row, missing in ((rows[1], "step_time"), (rows[STEPS], "step_time"), (rows[7], "num_tokens")):
        row[missing] = None
    run = read_run(write_run(tmp_path / "run", rows))
    np.testing.assert_allclose(run.along("seconds"), 2.0 * np.arange(1, STEPS + 1))
    np.testing.assert_allclose(run.along("tokens"), 100.0 * np.arange(1, STEPS + 1))
    [variation] = variations([run])
    row = table_row(variation, ["eval/acc"])
    assert (row.step_seconds[0], row.seconds[0], row.tokens[0]) == (2.0, 40.0, 2000.0)
    accuracy = eval_curve(variation, "eval/acc", "seconds")
    assert accuracy is not None and accuracy.x.tolist() == [0, 20, 40]
    for row in rows:
        row.pop("step_time", None)
    run = read_run(write_run(tmp_path / "untimed", rows))
    assert np.isnan(run.along("seconds")).all() and math.isnan(table_row(variations([run])[0], []).step_seconds[0])


def test_runs_that_logged_no_spikes_are_scored_by_their_norms(tmp_path: Path) -> None:
    rows = [
        {name: value for name, value in row.items() if not name.startswith("grad_spike")}
        for row in made_rows(0.0, 1.0, spike_at=STEPS)
    ]
    run = read_run(write_run(tmp_path / "run", rows))
    assert run.spike_scores.max() == pytest.approx(200 / ((19 * 2 + 200) / 20))
    assert run.spike_share == 1 / 20


def test_runs_are_grouped_by_their_options(tmp_path: Path) -> None:
    rows = made_rows(0.0, 1.0)
    write_run(tmp_path / "a" / "seed-0", rows)
    write_run(tmp_path / "a" / "seed-1", rows, seed=1, save_total_limit=7)
    write_run(tmp_path / "b" / "seed-0", rows, num_answers=4, task_args={"data": "scenes"})
    write_run(tmp_path / "b" / "seed-1", rows, num_answers=4, task_args={"data": "hub"})
    found = variations([read_run(folder) for folder in find_runs([tmp_path / "a", tmp_path / "b", tmp_path])])
    # The folders' names are all seeds, so that options tell the variations apart
    assert [(v.name, len(v.runs)) for v in found] == [
        ("T4A1 task_args.data=None", 2),
        ("T4A4 task_args.data=scenes", 1),
        ("T4A4 task_args.data=hub", 1),
    ]


def test_a_run_s_own_options_file_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", made_rows(0.0, 1.0))
    (folder / "config.yaml").write_text(resolved_yaml(TrainConfig(task="sums", num_answers=2, max_steps=40)))
    text = write_report([folder], ReportConfig(out=str(tmp_path / "out"))).read_text()
    assert "20 of 40 steps" in text and "run, seed 0" in text


@pytest.mark.slow
def test_run_in_progress_and_names_of_any_text_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>&", made_rows(0.0, 1.0)[:8])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "rew')
    page = Page(write_report([folder], ReportConfig()).read_text(encoding="utf-8"))
    assert page.rows[1][:3] == ["<b>&", "1", "7"]


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    write_run(tmp_path / "_cost$_$-seed-0", [{"step": 1, "reward": 0.5, "num_tokens": 9, "eval/a_$^{": 0.5}])
    groups = variations([read_run(folder) for folder in find_runs([tmp_path])])
    shown = {picture.name: picture for picture in pictures(groups, ["eval/a_$^{"], 1)}
    legend = shown["reward"].figure.axes[0].get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == [r" _cost\$_\$"]
    assert all(picture.png for picture in shown.values())


def test_a_run_is_counted_once_however_its_folder_is_called(grid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(grid)
    assert len(find_runs([Path("T4A1-seed-0"), grid, grid / "T4A4-seed-0/../T4A1-seed-1"])) == 3


def test_an_evaluation_after_a_step_that_was_not_trained_has_no_place(tmp_path: Path) -> None:
    rows = [*made_rows(0.1, 1.0), {"step": 99, "eval/acc": 0.9}]
    [variation] = variations([read_run(write_run(tmp_path / "x-seed-0", rows))])
    curve = eval_curve(variation, "eval/acc", "seconds")
    assert curve is not None and curve.x.tolist() == [0, 10, 20]


def test_metric_is_chosen_by_name(grid: Path) -> None:
    runs = [read_run(folder) for folder in find_runs([grid])]
    assert eval_metrics(runs) == eval_metrics(runs, "acc") == eval_metrics(runs, "eval/acc") == ["eval/acc"]
    with pytest.raises(UserError, match="metric=iou: no run has it; they have eval/acc"):
        eval_metrics(runs, "iou")
    assert table_cells([], [])[0][4] == "s / step"


def test_a_mixture_has_a_curve_and_a_column_of_each_task(tmp_path: Path) -> None:
    values = {"eval/sums/exact": 0.25, "eval/sums/reward": 0.5, "eval/boxes/iou": 0.75, "eval/boxes/reward": 0.5}
    rows = [row | (values if row["step"] in (0, STEPS) else {}) for row in made_rows(0.1, 1.0)]
    rows = [{name: value for name, value in row.items() if name != "eval/acc"} for row in rows]
    run = read_run(write_run(tmp_path / "mixed", rows, task=["sums=gsm8k", "boxes=refcoco"]))
    metrics = eval_metrics([run])
    assert metrics == ["eval/sums/exact", "eval/boxes/iou"]
    header, cells = table_cells([table_row(Variation("mixed", [run]), metrics)], metrics)
    assert dict(zip(header, cells, strict=True)).items() >= {
        ("held-out sums/exact", "0.250"),
        ("held-out boxes/iou", "0.750"),
    }
    names = [picture.name for picture in pictures(variations([run]), metrics, 1)]
    assert [name for name in names if name.startswith("accuracy")] == ["accuracy", "accuracy_2"]


def test_what_cannot_be_read_is_named(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name at least one folder"):
        main([])
    with pytest.raises(UserError, match=r"nowhere: there is no run in it"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"unknown option 'oot'.*'out'"):
        main([str(grid), "oot=x"])
    with pytest.raises(UserError, match="window=0"):
        main([str(grid), "window=0"])
    broken = grid / "T4A1-seed-0"
    text = (broken / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(text.replace('{"step": 3,', '{"step" 3,'))
    with pytest.raises(UserError, match=r"T4A1-seed-0/metrics.jsonl:4: no row of metrics"):
        main([str(grid)])
    (broken / "metrics.jsonl").write_text(text.replace('"num_tokens": 100.0', '"num_tokens": "many"', 1))
    with pytest.raises(UserError, match=r"metrics.jsonl:2: no row of metrics: num_tokens is 'many', no number"):
        main([str(grid)])
    (broken / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no run has finished a step yet"):
        main([str(broken)])
    (broken / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"T4A1-seed-0/config.yaml: the options of the run cannot be read"):
        main([str(grid)])


def test_a_folder_that_cannot_be_written_is_one_message(grid: Path) -> None:
    (grid / "file").write_text("")
    with pytest.raises(UserError, match=r"out=.*file/below: it cannot be written"):
        main([str(grid), f"out={grid / 'file' / 'below'}"])
