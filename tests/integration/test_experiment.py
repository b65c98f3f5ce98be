"""A grid of runs: each is the run that training alone would make, also after a kill; mistakes are named beforehand."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.forks import KILLED, Forks, Kill, forks

from vlm_grpo.common.config import load_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.experiment import ExperimentConfig, main, plan

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = {
    **{"task": "refcoco", "task_args": {"data": "scenes", "limit": 9}, "max_steps": 2, "prompts_per_step": 2},
    **{"max_thought_length": 5, "max_answer_length": 4, "eval_samples": 1, "eval_steps": 0, "save_steps": 1},
    **{"num_thoughts": 2, "diagnostics_every": 2, "learning_rate": 1e-3},
}
GRID: dict[str, Any] = {
    "output_dir": "grid",
    "base": BASE,
    "variations": {"T2A1": {"num_answers": 1}, "T2A2": {"num_answers": 2}},
    "seeds": [0, 3],
}
RUNS = ("T2A1-seed-0", "T2A2-seed-0", "T2A1-seed-3", "T2A2-seed-3")
METRICS = "vlm_grpo.train:MetricsWriter.write"
SAVE_MODEL_FILES = "vlm_grpo.train:save_model_files"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("experiments")) as server:
        (server.folder / "grid.yaml").write_text(yaml.safe_dump(GRID))
        yield server


def experiment(server: Forks, log: str, kill: Kill | None = None, processes: int = 1, **changes: Any) -> list[int]:
    return server.run("experiment", log, {"config": "grid.yaml", **changes}, processes, kill)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "time" not in k} for line in lines]


def said(server: Forks, log: str) -> list[str]:
    return re.findall(r"^run \d of \d: .*$", server.log(log), re.MULTILINE)


@pytest.fixture(scope="module")
def whole(server: Forks) -> Path:
    """The folder of the grid that nobody interrupted."""
    assert experiment(server, "whole") == [0], server.log("whole")
    return server.folder / "grid"


def test_every_variation_runs_with_every_seed_and_the_report_is_there(server: Forks, whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == sorted([*RUNS, "report"])
    assert said(server, "whole") == [f"run {i} of 4: {run} goes to grid/{run}" for i, run in enumerate(RUNS, start=1)]
    for run in RUNS:
        options = yaml.safe_load((whole / run / "config.yaml").read_text())
        assert (options["num_thoughts"], options["num_answers"]) == (2, int(run[3]))
        assert (options["seed"], options["max_steps"]) == (int(run[-1]), 2)
        assert [row["step"] for row in rows(whole / run)] == [0, 1, 2]
        assert "metric" in (whole / run / "log.txt").read_text(), "the table of before and after"
    assert "before " not in server.log("whole"), "what runs print is in their folders"
    assert len({json.dumps(rows(whole / run)) for run in RUNS}) == 4
    page = (whole / "report" / "report.html").read_text()
    assert "T2A1" in page and 'id="gradient_terms"' in page
    assert re.search(r"^T2A2 +2 +2 ", server.log("whole"), re.MULTILINE), "the table is printed too"


def test_a_run_of_the_grid_is_the_run_that_training_alone_makes(server: Forks, whole: Path) -> None:
    """The last of four in one process: nothing of the others is left in it."""
    flat = {name: value for name, value in BASE.items() if name != "task_args"}
    options = flat | {"task_args.data": "scenes", "task_args.limit": 9, "num_answers": 2, "seed": 3}
    assert server.run("train", "alone", options | {"output_dir": "alone"}) == [0], server.log("alone")
    assert rows(server.folder / "alone") == rows(whole / RUNS[-1])
    for name in ("model.safetensors", "checkpoint-2/optimizer.safetensors", "checkpoint-2/trainer_state.json"):
        assert (server.folder / "alone" / name).read_bytes() == (whole / RUNS[-1] / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "kill", "finished"),
    [
        ("in the first step", (METRICS, 2), 0),
        ("while the second run is saved", (SAVE_MODEL_FILES, 6), 1),
    ],
)
def test_killed_grid_goes_on_where_it_was(server: Forks, whole: Path, name: str, kill: Kill, finished: int) -> None:
    """Of the grid's second variation alone, in the same folders as if all were there."""
    folder, own = name.replace(" ", "-"), [run for run in RUNS if run.startswith("T2A2")]
    options = {"output_dir": folder, "only": "[T2A2]"}
    assert experiment(server, folder, kill, **options) == [KILLED], server.log(folder)
    done = [run for run in own if (server.folder / folder / run / "finished.json").is_file()]
    assert done == own[:finished]
    times = [(server.folder / folder / run / "metrics.jsonl").stat().st_mtime_ns for run in done]
    assert experiment(server, f"{folder}-2", **options) == [0], server.log(f"{folder}-2")
    states = ["is finished" if run in done else f"goes to {folder}/{run}" for run in own]
    assert said(server, f"{folder}-2") == [
        f"run {i} of 2: {run} {state}" for i, (run, state) in enumerate(zip(own, states, strict=True), start=1)
    ]
    assert times == [(server.folder / folder / run / "metrics.jsonl").stat().st_mtime_ns for run in done]
    for run in own:
        assert rows(server.folder / folder / run) == rows(whole / run)
        weights = [(parent / run / "model.safetensors").read_bytes() for parent in (server.folder / folder, whole)]
        assert weights[0] == weights[1]


def test_two_processes_run_the_grid_together(server: Forks) -> None:
    codes = experiment(server, "two", processes=2, output_dir="two", only="[T2A2]", seeds="[1]")
    assert codes == [0, 0], server.log("two")
    assert [row["step"] for row in rows(server.folder / "two" / "T2A2-seed-1")] == [0, 1, 2]
    assert (server.folder / "two" / "report" / "report.html").is_file()


def test_other_options_than_those_of_a_run_that_is_there_are_refused(server: Forks, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    assert experiment(server, "other", **{"base.learning_rate": 0.5}) == [2]
    assert re.search(r"error: run T2A1-seed-0: .*learning_rate was 0.001, is now 0.5", server.log("other"))
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}


def test_a_run_that_fails_is_named(server: Forks) -> None:
    assert experiment(server, "fails", output_dir="fails", **{"base.task_args.data": "nowhere"}) == [2]
    assert re.search(r"error: run T2A1-seed-0: train_split=train: task_args.data is 'nowhere'", server.log("fails"))


def grid(**changes: Any) -> ExperimentConfig:
    return ExperimentConfig(**(GRID | changes))


def varied(options: Any, base: Mapping[str, Any] = BASE) -> ExperimentConfig:
    return grid(variations={"T2A2": options}, base=dict(base))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (grid(output_dir=""), "output_dir in x.yaml: give the folder"),
        (grid(variations={}), "variations in x.yaml: name at least one"),
        (grid(seeds=[]), r"seeds=\[\] in x.yaml: must be at least one"),
        (grid(seeds=[1, 1]), r"seeds=\[1, 1\] in x.yaml"),
        (grid(only=["T9A9"]), r"no variation 'T9A9', only T2A1, T2A2"),
        (grid(only=[]), r"only=\[\]: must name at least one"),
        (varied(3), r"variations.T2A2 in x.yaml: got 3, but it takes a mapping"),
        (varied({"num_answer": 2}), r"'num_answer' in x.yaml, variations.T2A2; the nearest name is 'num_answers'"),
        (
            varied({"num_answers": "two"}),
            r"'num_answers' in x.yaml, variations.T2A2: got 'two', but it takes an integer",
        ),
        (varied({"seed": 2}), r"'seed' in x.yaml, variations.T2A2: the experiment itself gives it"),
        (varied({}, {"output_dir": "x"}), r"'output_dir' in x.yaml, base: the experiment itself gives it"),
        (varied({}, {"num_toughts": 2}), r"'num_toughts' in x.yaml, base; the nearest name is 'num_thoughts'"),
        (
            varied({"num_thoughts": 1, "num_answers": 1}),
            r"variations.T2A2 in x.yaml: num_thoughts=1 with num_answers=1",
        ),
        (varied({"save_total_limit": 0}), r"save_total_limit=0.*in x.yaml, variations.T2A2"),
        (varied({}, {**BASE, "eval_steps": -1}), r"eval_steps=-1.*in x.yaml, base"),
        (varied({"task": ""}), r"variations.T2A2 in x.yaml: task: name one of"),
        (grid(variations={"a/b": {}}), r"variations.a/b in x.yaml: the name is a folder's"),
        (grid(base_config="nowhere.yaml"), "config=nowhere.yaml: there is no such file"),
    ],
)
def test_mistakes_are_named_before_anything_runs(config: ExperimentConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(config, "in x.yaml")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_alpha": 8}, "lora_alpha=8.*lora_r=0"),
        ({"lora_r": -1}, "lora_r=-1"),
        ({"lora_r": 4, "beta": 0.1, "sync_ref_model": True}, "sync_ref_model=true.*lora_r=4"),
        ({"min_pixels": 99, "max_pixels": 9}, "min_pixels=99.*max_pixels=9"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"eval_samples": 0}, "eval_samples=0"),
        ({"max_prompt_length": 0}, "max_prompt_length=0"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1"),
        ({"task_weights": [2, 1]}, r"task_weights=\[2.0, 1.0\].*refcoco"),
        ({"task_weights": [0]}, r"task_weights=\[0.0\].*refcoco"),
        ({"train_split": ["train", "val"]}, r"train_split=\['train', 'val'\].*refcoco"),
        ({"eval_split": ["train", "val"]}, r"eval_split=\['train', 'val'\].*refcoco"),
        ({"task": "refcok"}, "unknown task 'refcok'"),
        ({"task": "nowhere:Task"}, "task=nowhere:Task"),
        ({"task": ["refcoco", "again=refcoco"]}, "task_args.data: which of the tasks"),
        ({"task_args": {"lmit": 3}}, "task_args.lmit"),
    ],
    ids=str,
)
def test_a_wrong_variation_in_the_last_place_is_named_before_the_first_run(
    options: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text(yaml.safe_dump(GRID | {"variations": {"first": {}, "last": options}}))
    monkeypatch.setattr("vlm_grpo.experiment.start_processes", lambda: pytest.fail("it begins"))
    with pytest.raises(UserError, match=named) as refused:
        main(["grid.yaml"])
    assert "in grid.yaml" in str(refused.value) and "variations.last" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.yaml"]


def test_base_file_then_base_then_variation(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("max_steps: 5\nnum_answers: 3\nlearning_rate: 1e-3\n")
    options = {
        "base": {"task": "refcoco", "learning_rate": "1e-4"},
        "variations": {"more": {"num_answers": 6}, "same": None},
    }
    more, same = plan(grid(base_config=str(tmp_path / "base.yaml"), seeds=[7], **options))
    assert (more.config.max_steps, more.config.num_answers, more.config.learning_rate) == (5, 6, 1e-4)
    assert (same.config.num_answers, same.config.seed, same.config.task) == (3, 7, "refcoco")
    assert (same.config.output_dir, same.config.resume_from_checkpoint) == ("grid/same-seed-7", True)


def test_the_file_is_named_first_and_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="output_dir on the command line: give the folder"):
        main([])
    with pytest.raises(UserError, match=r"a.yaml and b.yaml: name one file"):
        main(["a.yaml", "b.yaml"])
    with pytest.raises(UserError, match=r"config=a.yaml: there is no such file"):
        main(["a.yaml", "seeds=[1]"])
    with pytest.raises(SystemExit):
        main(["help=true"])


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiments").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_grids_are_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    config = load_config(ExperimentConfig, [f"config={path}"])
    runs = plan(config)
    assert len(runs) == len(config.variations) * len(config.seeds) and len(config.seeds) == 3
    for run in runs:
        if name := re.fullmatch(r"T(\d+)A(\d+)-seed-(\d)", run.name):
            given = (run.config.num_thoughts, run.config.num_answers, run.config.seed)
            assert given == tuple(map(int, name.groups()))
        assert name or "branching" not in path.name
