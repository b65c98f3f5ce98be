"""The tables and pictures of the README and the pages are those of the package."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from support.families import BUILDERS
from support.pages import PAGES, ROOT, blocks, names, prose, section, table, tables

import vlm_grpo.scoring
import vlm_grpo.task
from tasks._formats import ANSWER, FORMS, IMAGES, OPTIONS, QUESTION
from tasks.jsonl import REWARDS, Jsonl
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.experiment import ExperimentConfig
from vlm_grpo.model.families import FAMILIES, Family
from vlm_grpo.sft import SftConfig
from vlm_grpo.task import TaskAdapter
from vlm_grpo.train import TrainConfig
from vlm_grpo.tree.pack import ancestors, visible

OPTIONS_PAGE = "docs/options.md"
OPTION_TABLES = "option", "default", "when to touch it"


def test_the_readme_is_a_screen_and_a_bit() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_a_table_that_stands_twice_is_the_same() -> None:
    seen: dict[tuple[str, ...], list[list[str]]] = {}
    for page in PAGES:
        for header, *rows in tables(page):
            if tuple(header[:3]) != OPTION_TABLES:
                assert seen.setdefault(tuple(header), rows) == rows, f"{page}: {header}"


def test_the_mask_of_the_architecture_is_the_tree_rule() -> None:
    picture = next(block for block in blocks("docs/architecture.md", "") if block.startswith("token "))
    tokens, positions, *rows = [(line[:10].split(), line[10:]) for line in picture.splitlines()]
    parents, segment, path = [-1, 0, 1, 1, 0, 4], [0, 0, 0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5, 3, 4]
    assert positions[1].split() == [str(position) for position in path]
    assert [row[0] for (row, _) in rows] == tokens[1].split() == list("pppssabtc")
    seen = [[line[2 * i : 2 * i + 1] == "x" for i in range(len(path))] for _, line in rows]
    where, along = torch.tensor(segment), torch.tensor(path)
    assert seen == visible(ancestors(parents), where, along, where, along).tolist()


def test_forms_rewards_and_arguments_of_jsonl_are_the_code_s(tmp_path: Path) -> None:
    keys = {name: names(cell) for name, cell in table("docs/tasks.md", "form")}
    assert set(keys) == set(FORMS)
    assert keys["question and answer"] == [*QUESTION, *ANSWER]
    for name, (needed, _, _) in FORMS.items():
        assert {key for either in needed for key in either} <= set(keys[name])
    rewards = {names(cell)[0]: about for cell, about, _ in table("docs/tasks.md", "`task_args.reward`")}
    assert {name: about.removeprefix("1 if ") for name, about in rewards.items()} == {
        name: part.about for name, part in REWARDS.items()
    }
    of_rows = section("docs/tasks.md", "## Rows of your own")
    assert set(inspect.signature(Jsonl).parameters) == set(re.findall(r"`task_args\.(\w+)", of_rows))
    assert {*IMAGES, *OPTIONS, "id"} <= set(names(of_rows))
    [row] = [name for name in names(of_rows) if name.startswith('{"image"')]
    (tmp_path / "train.jsonl").write_text(row)
    sample = Jsonl(str(tmp_path), "number").samples("train")[0]
    assert (sample.images[0], sample.question) == (tmp_path / "1.png", "How many cups?")


def test_table_of_families_is_the_package_s_and_all_are_tested() -> None:
    listed = {names(kind)[0]: coordinates for _, kind, coordinates in table("docs/models.md", "family")}
    assert listed == {kind: family.coordinates.value for kind, family in FAMILIES.items()}
    assert set(listed) <= set(BUILDERS), "the exactness tests run over the tiny models of support/families.py"


def test_table_of_facts_names_what_a_family_has() -> None:
    listed = {name for cell, _ in table("docs/models.md", "fact") for name in names(cell)}
    assert listed == {field.name for field in dataclasses.fields(Family)}


def test_the_map_names_every_folder() -> None:
    picture = next(block for block in blocks("docs/architecture.md", "") if block.startswith("vlm_grpo/ "))
    listed, above = set(), ""
    for line in picture.splitlines():
        name, purpose = line.split(maxsplit=1)
        assert purpose and name.endswith("/")
        above = above if line.startswith(" ") else name
        listed.add(above + name if line.startswith(" ") else name)
    assert [name for name in listed if not (ROOT / name).is_dir()] == []
    rooms = {f"vlm_grpo/{path.parent.name}/" for path in (ROOT / "vlm_grpo").glob("*/__init__.py")}
    assert rooms <= listed, "every room has a line in the map"


def test_algorithms_are_options_that_the_trainer_accepts() -> None:
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    for option, values in table("docs/algorithms.md", "option", "values"):
        for name, group in zip(names(option), values.split(";"), strict=True):
            assert f"{names(group)}" == re.findall(r"\[.*\]", str(fields[name].type))[0].replace('"', "'")


def _defaults(config: type) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.structured(config))  # type: ignore[return-value]


def _documented(*titles: str) -> dict[str, Any]:
    """Options of these sections of the page with their defaults; each has all it takes to be one."""
    found: dict[str, Any] = {}
    for title in titles:
        text = section(OPTIONS_PAGE, title)
        for line in re.findall(r"^\| `.*", text, re.MULTILINE):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4 and all(cells), line
            [name], [default] = names(cells[0]), names(cells[1])
            assert name not in found, f"{name} stands twice"
            found[name] = yaml.safe_load(default)
    return found


ROOMS = {"## Task and data": "task and data", "## Model": "model", "## Rollout": "rollout", "## Algorithm": "algorithm"}


def test_every_option_of_training_is_on_the_page_with_its_default() -> None:
    assert _documented(*ROOMS, "## Runs") == _defaults(TrainConfig)


def test_options_stand_in_their_rooms_and_the_first_are_named() -> None:
    owners = {name: owner for owner in reversed(TrainConfig.__mro__) for name in inspect.get_annotations(owner)}
    for title, room in ROOMS.items():
        assert {owners[name].ROOM for name in _documented(title)} == {room}
    [first] = re.findall(r"^\*\*Everyone needs these first:\*\*.*?\n\n", prose(OPTIONS_PAGE), re.MULTILINE | re.DOTALL)
    assert names(first) == list(TrainConfig.FIRST)


def test_own_options_of_the_other_programs_are_on_the_page() -> None:
    shared = _defaults(TrainConfig)
    sft, evaluating = _defaults(SftConfig), _defaults(EvaluateConfig)
    for title, options in (("## Supervised training", sft), ("## Evaluating", evaluating)):
        own = _documented(title)
        assert own.items() <= options.items()
        assert {name for name in options if name not in own} <= set(shared)
        assert all(options[name] == shared[name] for name in options if name not in own)
    assert _documented("## Experiments") == _defaults(ExperimentConfig)


def test_the_table_names_every_member_of_an_adapter() -> None:
    named = set(re.findall(r"`(\w+)", section("docs/writing_a_task.md", "## What each part means")))
    members = {name for name in vars(TaskAdapter) if not name.startswith("_")} - {"demo_args", "full_marks"}
    assert members <= named


def test_api_pages_name_what_a_task_is_written_with() -> None:
    for page, module in (("docs/api/task.md", vlm_grpo.task), ("docs/api/scoring.md", vlm_grpo.scoring)):
        named = re.findall(rf"^::: {module.__name__}\.([\w.]+)$", PAGES[page], re.MULTILINE)
        here = {name for name in named if "." not in name}
        documented = {name for name in module.__all__ if inspect.getdoc(getattr(module, name)) and name[0] != "_"}
        assert here <= documented
        inner = {"by_name", "describe", "groups_of", "metric_terms", "task_name", "Samples", "Tasks", "Box"}
        assert documented - here <= inner | {"UserError", "soft_accuracy"}
