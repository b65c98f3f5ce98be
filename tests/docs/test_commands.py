"""Every command of the README and the pages is accepted: its options parse, its files and targets exist."""

import ast
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from support.launch import Launch
from support.pages import PAGES, ROOT, commands, names, table

from vlm_grpo.common.config import load_config
from vlm_grpo.common.program import run as run_program
from vlm_grpo.data.tasks import tasks_of
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.experiment import ExperimentConfig, plan
from vlm_grpo.sft import SftConfig
from vlm_grpo.task import known_tasks
from vlm_grpo.train import TrainConfig
from vlm_grpo.train import main as train

PROGRAMS = {"vlm_grpo.train": TrainConfig, "vlm_grpo.evaluate": EvaluateConfig, "vlm_grpo.sft": SftConfig}
EVERY = [pytest.param(command, id=f"{page}: {' '.join(command)}") for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("command", EVERY)
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
        case ["python", "tests/support/one_tree.py"]:
            assert (ROOT / "tests/support/one_tree.py").is_file(), "test_code.py compares what it prints"
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


def test_scripts_of_the_table_of_tasks_take_these_options() -> None:
    rows = {names(task)[0]: names(script) for task, *_, script in table("docs/tasks.md", "task", "data")}
    assert set(rows) == set(known_tasks()) - {"tiny_warm_start"}
    for task, commands_of in rows.items():
        for command in commands_of:
            script, *options = shlex.split(command)
            assert script == task and any(option.startswith("out=") for option in options)
            check_program(f"data_scripts.{script}", options)
    assert [task for task, commands_of in rows.items() if not commands_of] == ["jsonl"], "it reads any rows"


def test_errors_are_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "task=refcok"])
    with pytest.raises(SystemExit) as stopped:
        run_program(train)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: unknown task 'refcok'\. Did you mean 'refcoco'\?.*\n", said)


def test_a_quiet_launcher_adds_no_traceback_and_makes_it_status_1(tmp_path: Path, launch: Launch) -> None:
    assert any("--quiet" in command for command in commands("docs/troubleshooting.md"))
    (tmp_path / "fails.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(SystemExit) as stopped:
        launch(tmp_path, ["accelerate", "launch", "--quiet", "fails.py"])
    assert stopped.value.code == 1
