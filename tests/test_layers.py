"""The floors of the package: a module imports only from lower floors, or from those named before it on its own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

FLOORS = (
    # tiny is the folder of the shipped model and its path, no code
    (
        *(
            "errors",
            "images",
            "tables",
            "program",
            "names",
            "options",
            "option_help",
            "whole_files",
            "located",
            "scoring",
            "parsing",
        ),
        *("numerals", "quantities", "mathematics"),
        *("shapes", "task", "judge", "tiny", "bootstrap", "pass_at_k", "clock"),
    ),
    # config knows no option, only dataclasses in general, so that every program on floors 4 and 5 can read its own
    (
        *("config", "processes", "optim", "rollout", "coordinates", "advantage", "objectives", "loss", "shaping"),
        *("reference", "diagnostics", "branching", "tags", "sampling", "growth"),
    ),
    ("tree", "layout", "attention", "families", "levels", "cache", "features", "prompts", "vlm", "load"),
    ("prefetch", "data", "mixture", "scorer", "stats", "engine", "minibatch", "grading", "update"),
    (
        *("metrics", "checkpoint", "run_folder", "predictions", "measure", "results", "answering", "evaluate"),
        *("trainer", "check", "sft", "runs", "figures", "report"),
    ),
    ("train", "experiment", "testing"),
)
ORDER = [module for floor in FLOORS for module in floor]

# What a task may use: the interface, pure scoring, and the error for the user
TASK_IMPORTS = {
    f"vlm_grpo.{module}"
    for module in ("task", "scoring", "parsing", "quantities", "mathematics", "shapes", "images", "errors")
}

# What data scripts take from the tasks: generated samples, and how rows on the hub are read
SHARED_WITH_SCRIPTS = ("tasks._generated", "tasks._hub_rows")


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of all modules of ours that a file in `package` imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package, node.module])) if node.level else node.module or ""
            # `from vlm_grpo import tree` imports vlm_grpo.tree; `from vlm_grpo.tree import pack` imports vlm_grpo.tree
            whole = base in ("vlm_grpo", "tasks", "data_scripts")
            names = [f"{base}.{alias.name}" for alias in node.names] if whole else [base]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("vlm_grpo", "tasks", "data_scripts"))


def upward_imports(module: str, source: str) -> list[str]:
    """What `vlm_grpo.{module}` imports although it must not."""
    allowed = {f"vlm_grpo.{lower}" for lower in ORDER[: ORDER.index(module)]}
    names = imported(ast.parse(source), "vlm_grpo")
    return [name for name in names if ".".join(name.split(".")[:2]) not in allowed]


def names_of_tasks(source: str, tasks: set[str]) -> list[str]:
    """String literals that name a task; docstrings and comments may give examples."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    literals = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    names = "|".join(map(re.escape, tasks)) or "(?!)"
    return [text for text in literals if re.fullmatch(names, text) or re.search(rf"\btasks?[=./]({names})\b", text)]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def module_name(path: Path) -> str:
    return path.relative_to(ROOT / "vlm_grpo").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules("vlm_grpo"), ids=lambda path: str(path.relative_to(ROOT)))
def test_package_imports_only_from_lower_floors(path: Path) -> None:
    module = module_name(path)
    if module == "__init__":
        assert not list(imported(ast.parse(path.read_text()), "vlm_grpo")), "importing the package must cost nothing"
        return
    assert module in ORDER, f"give vlm_grpo/{module} its place in FLOORS"
    assert upward_imports(module, path.read_text()) == []


@pytest.mark.parametrize("path", modules("tasks"), ids=lambda path: str(path.relative_to(ROOT)))
def test_tasks_import_only_the_task_interface(path: Path) -> None:
    ours = set(imported(ast.parse(path.read_text()), "tasks"))
    others = {name for name in ours if not name.startswith("tasks._")}
    assert others <= TASK_IMPORTS, "and what tasks share lies in tasks/_*.py"


@pytest.mark.parametrize("path", modules("data_scripts"), ids=lambda path: str(path.relative_to(ROOT)))
def test_data_scripts_import_of_tasks_only_what_needs_no_package(path: Path) -> None:
    names = imported(ast.parse(path.read_text()), "data_scripts")
    assert [name for name in names if not name.startswith(("data_scripts.", *SHARED_WITH_SCRIPTS))] == []


SHARED = [path for path in modules("tasks") if dotted(path).startswith(SHARED_WITH_SCRIPTS)]


@pytest.mark.parametrize("path", SHARED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_tasks_share_with_data_scripts_needs_no_package(path: Path) -> None:
    names = imported(ast.parse(path.read_text()), "tasks")
    assert [name for name in names if not name.startswith(SHARED_WITH_SCRIPTS)] == []


@pytest.mark.parametrize("path", modules("vlm_grpo"), ids=lambda path: str(path.relative_to(ROOT)))
def test_package_names_no_task(path: Path) -> None:
    tasks = {path.stem for path in modules("tasks")} - {"__init__"}
    assert names_of_tasks(path.read_text(), tasks) == []


def test_upward_imports_are_seen_in_every_form() -> None:
    source = """
from vlm_grpo.errors import UserError
import vlm_grpo.engine
from vlm_grpo import trainer, task
from .vlm import VLM
from . import tree
def late():
    from vlm_grpo.loss import policy_loss
import tasks.refcoco
"""
    found = ["vlm_grpo.engine", "vlm_grpo.trainer", "tasks.refcoco", "vlm_grpo.vlm", "vlm_grpo.tree", "vlm_grpo.loss"]
    assert sorted(upward_imports("rollout", source)) == sorted(found)


def test_names_of_tasks_are_seen_outside_docstrings() -> None:
    source = '"""As in task=chess."""\nname = "tasks/chess.py"  # chess\nf("chess")\n"a game of chess: chessboard"\n'
    assert names_of_tasks(source, {"chess"}) == ["tasks/chess.py", "chess"]


def test_shapes_and_types_are_checked_in_tests() -> None:
    from vlm_grpo.advantage import AdvantageConfig, group_advantages

    with pytest.raises(Exception, match=r"type-check|Type-check"):
        group_advantages(torch.zeros(3), AdvantageConfig())
