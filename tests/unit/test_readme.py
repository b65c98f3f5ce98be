"""The README holds: its commands parse, its code runs, its tables and pictures are those of the package."""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from PIL import Image
from support.families import BUILDERS

from tasks._formats import ANSWER, FORMS, IMAGES, OPTIONS, QUESTION
from tasks.jsonl import REWARDS, Jsonl
from vlm_grpo.common.config import load_config
from vlm_grpo.common.program import run as run_program
from vlm_grpo.data.tasks import tasks_of
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.experiment import ExperimentConfig, plan
from vlm_grpo.model.families import FAMILIES
from vlm_grpo.sft import SftConfig
from vlm_grpo.task import known_tasks
from vlm_grpo.tiny import TINY_PATH
from vlm_grpo.train import TrainConfig
from vlm_grpo.train import main as train
from vlm_grpo.tree.pack import ancestors, visible

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {"vlm_grpo.train": TrainConfig, "vlm_grpo.evaluate": EvaluateConfig, "vlm_grpo.sft": SftConfig}


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for named, text in fenced if named == language]


def commands() -> list[list[str]]:
    """The words of every command in the shell blocks, without comments and settings of the environment."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [[*_without_settings(command)] for command in words if command]


def _without_settings(command: list[str]) -> Iterator[str]:
    first = next(i for i, word in enumerate(command) if not re.fullmatch(r"[A-Z_]+=.*", word))
    yield from command[first:]


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the table whose header begins with `heading`."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_are_accepted(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    match command:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", "-e", "."]:
            assert (ROOT / "pyproject.toml").is_file()
        case ["accelerate", "launch", *arguments]:
            launched = launch_command_parser().parse_args(arguments)
            assert launched.module
            check_program(launched.training_script, launched.training_script_args)
        case ["python", "-m", module, *arguments]:
            check_program(module, arguments)
        case ["python", "-c", source]:
            ast.parse(source)
        case ["python", "tests/bench/exercise.py", _, *options]:
            assert (ROOT / "tests/bench/exercise.py").is_file() and load_config(TrainConfig, options)
        case ["python", script, *arguments]:
            flags = [argument for argument in arguments if argument.startswith("--")]
            assert flags and all(flag in (ROOT / script).read_text() for flag in flags)
        case ["tensorboard", "--logdir", "runs"]:
            dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
            assert any(dependency.startswith("tensorboard") for dependency in dependencies)
        case _:
            raise AssertionError(f"nothing here knows how to check {command}")


def check_program(module: str, arguments: list[str]) -> None:
    if module == "vlm_grpo.experiment":
        assert plan(load_config(ExperimentConfig, [f"config={arguments[0]}", *arguments[1:]]))
        return
    if module == "vlm_grpo.report":
        assert arguments and not any("=" in argument for argument in arguments), "folders of runs"
        return
    if module not in PROGRAMS:
        options = importlib.import_module(module).OPTIONS
        assert all(argument.partition("=")[0] in (*options, "help") for argument in arguments)
        return
    if arguments == ["help=true"]:
        return
    config = load_config(PROGRAMS[module], arguments)
    if ":" not in config.task:
        tasks_of(config, demo=config.model == "tiny")


@pytest.fixture
def cups(tmp_path: Path) -> Path:
    """A folder in which the README's task lies as my_task.py, beside its data."""
    adapter, *_ = blocks("python")
    assert 20 <= len(adapter.splitlines()) <= 30, "a complete adapter in about 25 lines"
    (tmp_path / "my_task.py").write_text(adapter)
    (tmp_path / "cups").mkdir()
    for split in ("train", "val"):
        rows = [
            {"image": f"{split}{count}.png", "question": "How many cups?", "answers": [str(count)]}
            for count in range(1, 5)
        ]
        (tmp_path / "cups" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            Image.new("RGB", (60, 40), (50 * int(row["answers"][0]), 90, 90)).save(tmp_path / "cups" / row["image"])
    return tmp_path


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., tuple[str, str]]:
    """Runs an `accelerate launch` command in a folder; its output and its errors. The launcher itself runs in here."""

    def launch(folder: Path, command: list[str], *more: str) -> tuple[str, str]:
        assert command[:2] == ["accelerate", "launch"]
        monkeypatch.chdir(folder)
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        launch_command(launch_command_parser().parse_args([*command[2:], *more]))
        return capfd.readouterr()

    return launch


def test_the_adapter_in_the_readme_trains(cups: Path, launch: Callable[..., tuple[str, str]]) -> None:
    checks, trains = [command for command in commands() if "my_task:ShortAnswers" in " ".join(command)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    checked = subprocess.run([sys.executable, *checks[1:]], cwd=cups, env=environment, capture_output=True, check=True)
    assert checked.stdout.startswith(b"task my_task:ShortAnswers: 4 samples of 'train'") and checked.stderr == b""

    few = ["max_steps=2", "prompts_per_step=2", "num_thoughts=2", "num_answers=2", "eval_steps=1"]
    printed, progress = launch(cups, trains, *few)
    said = [line for line in progress.splitlines() if "accelerate" not in line and "was set to a value" not in line]
    assert len(said) == 4
    assert all(re.match(r"step \d/2 · reward [\d.]+ · tokens/s |step \d · val reward ", line) for line in said), said
    assert "val, 4 samples, greedy:\nmetric" in printed

    run = cups / "runs" / "my_task-ShortAnswers-tiny"
    for files, _ in table("file"):
        for name in names(files):
            found = [*run.glob(re.sub(r"N+", "*", name))]
            assert found or name.startswith(("adapter_", "config=")), f"{name} is not in {[*run.iterdir()]}"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row}
    for cell, _ in table("metric"):
        for name in names(cell):
            assert name.format(part="words", metric="reward") in logged


def test_saved_models_load_as_the_readme_says(tmp_path: Path) -> None:
    _, load = blocks("python")
    assert '"runs/refcoco-tiny"' in load, "the folder of the demonstration"
    scope: dict[str, object] = {}
    exec(compile(load.replace('"runs/refcoco-tiny"', repr(str(TINY_PATH))), "README.md", "exec"), scope)
    assert type(scope["model"]).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(scope["processor"]).__name__ == "Qwen2_5_VLProcessor"


def test_errors_are_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "task=refcok"])
    with pytest.raises(SystemExit) as stopped:
        run_program(train)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: unknown task 'refcok'\. Did you mean 'refcoco'\?.*\n", said)


def test_a_quiet_launcher_adds_no_traceback_and_makes_it_status_1(
    tmp_path: Path, launch: Callable[..., tuple[str, str]]
) -> None:
    assert any("--quiet" in command for command in commands())
    (tmp_path / "fails.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(SystemExit) as stopped:
        launch(tmp_path, ["accelerate", "launch", "--quiet", "fails.py"])
    assert stopped.value.code == 1


def test_the_mask_in_the_readme_is_the_tree_rule() -> None:
    picture = next(block for block in blocks("") if block.startswith("token "))
    tokens, positions, *rows = [(line[:10].split(), line[10:]) for line in picture.splitlines()]
    parents, segment, path = [-1, 0, 1, 1, 0, 4], [0, 0, 0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5, 3, 4]
    assert positions[1].split() == [str(position) for position in path]
    assert [row[0] for (row, _) in rows] == tokens[1].split() == list("pppssabtc")
    seen = [[line[2 * i : 2 * i + 1] == "x" for i in range(len(path))] for _, line in rows]
    where, along = torch.tensor(segment), torch.tensor(path)
    assert seen == visible(ancestors(parents), where, along, where, along).tolist()


def test_forms_rewards_and_arguments_of_jsonl_are_the_code_s(tmp_path: Path) -> None:
    keys = {name: names(cell) for name, cell in table("form")}
    assert set(keys) == set(FORMS)
    assert keys["question and answer"] == [*QUESTION, *ANSWER]
    for name, (needed, _, _) in FORMS.items():
        assert {key for either in needed for key in either} <= set(keys[name])
    rewards = {names(cell)[0]: about for cell, about, _ in table("`task_args.reward`")}
    assert {name: about.removeprefix("1 if ") for name, about in rewards.items()} == {
        name: part.about for name, part in REWARDS.items()
    }
    section = README.partition("### Rows of your own\n")[2].partition("\n## ")[0]
    assert set(inspect.signature(Jsonl).parameters) == set(re.findall(r"`task_args\.(\w+)", section))
    assert {*IMAGES, *OPTIONS, "id"} <= set(names(section))
    [row] = [name for name in names(section) if name.startswith('{"image"')]
    (tmp_path / "train.jsonl").write_text(row)
    sample = Jsonl(str(tmp_path), "number").samples("train")[0]
    assert (sample.images[0], sample.question) == (tmp_path / "1.png", "How many cups?")


def test_table_of_families_is_the_package_s_and_all_are_tested() -> None:
    listed = {names(kind)[0]: coordinates for _, kind, coordinates in table("family")}
    assert listed == {kind: family.coordinates.value for kind, family in FAMILIES.items()}
    assert set(listed) <= set(BUILDERS), "the exactness tests run over the tiny models of tests/families.py"


def test_table_of_tasks_names_every_task_and_options_that_its_script_has() -> None:
    rows = {names(task)[0]: names(script) for task, *_, script in table("task")}
    assert set(rows) == set(known_tasks()) - {"tiny_warm_start"}
    for task, commands_of in rows.items():
        for command in commands_of:
            script, *options = shlex.split(command)
            assert script == task and any(option.startswith("out=") for option in options)
            check_program(f"data_scripts.{script}", options)
    assert [task for task, commands_of in rows.items() if not commands_of] == ["jsonl"], "it reads any rows"


def test_tree_of_files_names_every_module() -> None:
    tree = next(block for block in blocks("") if block.startswith("vlm_grpo/\n"))
    listed, folder = set(), ""
    for line in tree.splitlines():
        name, *purpose = line.split(maxsplit=1)
        assert purpose or not line.startswith(" "), f"what is {name} for?"
        folder = folder if line.startswith(" ") else name
        listed.add(folder + name if line.startswith(" ") else name)
    assert [name for name in listed if not (ROOT / name).exists()] == []
    modules = {
        str(path.relative_to(ROOT))
        for top in ("vlm_grpo", "tasks", "data_scripts")
        for path in (ROOT / top).glob("*.py")
    }
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.yaml")}
    missing = {module for module in modules if not module.endswith("__init__.py")} - listed
    assert not missing, "every module has a line in the README's tree"


def test_files_links_and_options_that_the_text_names_exist() -> None:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    tops = ("vlm_grpo/", "tasks/", "data_scripts/", "configs/", "tests/")
    missing = [name for name in names(text) if name.startswith(tops) and not (ROOT / name).exists()]
    assert missing == []
    headings = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", README, re.MULTILINE)}
    assert set(re.findall(r"\]\((#[^)]+)\)", README)) <= headings
    options = {option for kind in PROGRAMS.values() for option in kind.__dataclass_fields__}
    settings = {
        name.partition("=")[0].partition(".")[0] for name in names(text) if re.fullmatch(r"[a-z_.*]+=\S*", name)
    }
    assert settings - options <= {"key", "config", "data", "dataset"}, "the last two are arguments of tasks/refcoco.py"
