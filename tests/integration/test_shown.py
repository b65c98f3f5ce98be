"""The configurations of configs/shown: the commands that each names run one after the other, in small sizes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from data_scripts import tiny_arithmetic, tiny_tasks
from data_scripts.writing import DataError
from tasks.code import Code
from tasks.jsonl import Jsonl
from vlm_grpo import sft, train
from vlm_grpo.common.config import load_config
from vlm_grpo.task import check_task, find_task, score
from vlm_grpo.train import TrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "shown").glob("*.yaml"))
SMALL = {
    "data_scripts.tiny_arithmetic": {"train": "8", "test": "3", "warm": "8"},
    "data_scripts.tiny_tasks": {
        "names_train": "3",
        "names_val": "2",
        "code_warm": "3",
        "code_train": "3",
        "code_val": "2",
    },
    "vlm_grpo.sft": {"max_steps": "1", "batch_size": "2", "eval_samples": "2"},
    "vlm_grpo.train": {
        "max_steps": "2",
        "prompts_per_step": "2",
        "eval_samples": "2",
        "num_thoughts": "2",
        "num_answers": "2",
    },
}
PROGRAMS = {"vlm_grpo.sft": sft.main, "vlm_grpo.train": train.main}
SCRIPTS = {"data_scripts.tiny_arithmetic": tiny_arithmetic.convert, "data_scripts.tiny_tasks": tiny_tasks.convert}


def commands(config: Path) -> list[tuple[str, dict[str, str]]]:
    """Module and options of every command in the comment that a file begins with."""
    comment = "\n".join(line[1:] for line in config.read_text().partition("\n\n")[0].splitlines())
    found = re.findall(r"^ {3}(?:python|accelerate launch) -m (\S+) (.*)$", comment.replace("\\\n", " "), re.MULTILINE)
    return [(module, dict(word.split("=", 1) for word in shlex.split(words))) for module, words in found]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_commands_of_a_shown_configuration_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(config.parent.parent)
    *_, last = given = commands(config)
    assert last == ("vlm_grpo.train", {"config": f"configs/shown/{config.name}"})
    for module, options in given:
        options |= SMALL[module]
        if module in SCRIPTS:
            SCRIPTS[module](options)
        else:
            PROGRAMS[module]([f"{key}={value}" for key, value in options.items()])
    resolved = load_config(TrainConfig, [f"config={config}"])
    assert resolved.output_dir == f"runs/shown-{config.stem}"
    rows = [json.loads(line) for line in (tmp_path / resolved.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 1, 2}
    headline = f"eval/{find_task(resolved.task, resolved.task_args).headline}"
    assert [row["step"] for row in rows if headline in row or "eval/reward" in row] == [0, 2]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_shown_configuration_holds_out_what_it_evaluates(config: Path) -> None:
    resolved = load_config(TrainConfig, [f"config={config}"])
    splits = [resolved.train_split, resolved.eval_split]
    for module, options in commands(config):
        if module == "vlm_grpo.sft":
            splits.append("sft" if options["task"] == "tiny_warm_start" else options.get("train_split", "train"))
    assert len(set(splits)) == len(splits), f"warm start, training and evaluation: {splits}"
    assert resolved.eval_samples is not None and resolved.eval_samples >= 256
    for module, options in commands(config):
        if module == "vlm_grpo.sft":
            assert options["output_dir"] == resolved.model
            if options["task"] == "tiny_warm_start":  # scenes of the split sft
                continue
            assert options["task"] == resolved.task
            assert int(options.get("max_answer_length", "24")) == resolved.max_answer_length
            assert int(options.get("max_thought_length", "16")) == resolved.max_thought_length
            assert options.get("task_args.data", "scenes") == resolved.task_args["data"]


def test_shown_configurations_hold_what_differs_from_the_defaults() -> None:
    default = load_config(TrainConfig, ["task=refcoco"])
    for config in CONFIGS:
        said = yaml.safe_load(config.read_text())
        needless = [key for key, value in said.items() if key != "model" and getattr(default, key) == value]
        assert not needless, f"{config.name}: {needless}"


def test_generated_files_are_valid_tasks_of_disjoint_splits(tmp_path: Path) -> None:
    tiny_tasks.convert({"out": str(tmp_path), "names_train": "12", "names_val": "6"})
    names = Jsonl(str(tmp_path / "names"), reward="anls")
    code = Code(str(tmp_path / "code"), shown_tests=0)
    check_task(names, "train")
    check_task(names, "val")
    check_task(code, "val")
    asked = {split: {sample.question for sample in code.samples(split)} for split in ("warm", "train", "val")}
    assert [len(questions) for questions in asked.values()] == [300, 600, 256]
    assert len(set.union(*asked.values())) == 300 + 600 + 256, "no two functions are asked for alike"


def test_more_functions_than_there_are_is_an_error(tmp_path: Path) -> None:
    small = {"out": str(tmp_path), "names_train": "1", "names_val": "1"}
    with pytest.raises(DataError, match=r"code_train=3000 \+ code_val=256 are more than there are functions: 2,352"):
        tiny_tasks.convert(small | {"code_train": "3000"})


def test_a_generated_function_is_told_from_its_neighbours(tmp_path: Path) -> None:
    tiny_tasks.convert({"out": str(tmp_path), "names_train": "1", "names_val": "1"})
    code = Code(str(tmp_path / "code"), shown_tests=0)
    sample = code.samples("val")[0]
    right = code.reference_answer(sample)
    [constant, *_] = re.findall(r"\d+", right)
    wrong = right.replace(constant, str(int(constant) + 1), 1)
    assert score(code, sample, right).parts["all_passed"] == 1
    assert score(code, sample, wrong).parts["all_passed"] == 0
