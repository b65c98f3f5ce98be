"""The rooms of the package: each imports only from the rooms below it, and no private name of another."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

# What each room may import, beside itself; the programs, files of the package itself, may import all of them
BELOW = {
    "common": (),
    "tiny": (),
    "scoring": ("common",),
    "task": ("common", "scoring"),
    "tree": ("common", "scoring", "task"),
    "model": ("common", "tiny", "scoring", "task", "tree"),
    "data": ("common", "scoring", "task", "tree", "model"),
    "rollout": ("common", "scoring", "task", "tree", "model"),
    "algorithm": ("common", "scoring", "task", "tree", "model", "data", "rollout"),
    "evaluation": ("common", "scoring", "task", "tree", "model", "data", "rollout"),
    "runs": ("common", "scoring", "task", "tree", "model", "data", "rollout", "algorithm", "evaluation"),
}
PROGRAMS = {"train", "sft", "evaluate", "experiment", "report"}
# Old names of modules that users import, kept for one release
SHIMS = {"errors", "parsing", "quantities", "mathematics"}

# What a task may use: the interface, pure scoring, and the one way to open images and to suggest names
TASK_IMPORTS = re.compile(r"vlm_grpo\.((task|scoring)(\.\w+)?|common\.(errors|images|names))")


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a file in `package` imports of ours, wherever it stands; the name is empty for a
    module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            pairs = [(base, alias.name) for alias in node.names]
        else:
            continue
        yield from ((m, name) for m, name in pairs if m.split(".")[0] in ("vlm_grpo", "tasks", "data_scripts"))


def place(parts: tuple[str, ...]) -> str:
    """The room of a module's path below the package, or "" for a program."""
    return parts[0] if len(parts) > 1 or parts[0] in BELOW else ""


def faults(path: str, source: str) -> list[str]:
    """What the module `path` (such as tree/pack.py) imports although it must not."""
    parts = tuple(path.removesuffix(".py").removesuffix("/__init__").split("/"))
    room = place(parts)
    package = ".".join(["vlm_grpo", *(parts if path.endswith("__init__.py") else parts[:-1])])
    found = []
    for module, name in imported(ast.parse(source), package):
        # `from vlm_grpo import tree` and `from vlm_grpo.tree import pack` may name a module
        below = (*module.split(".")[1:], *([name] if name else []))
        other = below[0] if module.startswith("vlm_grpo") and below and below[0] in BELOW else ""
        allowed = bool(other) and (room == "" or other == room or other in BELOW[room])
        # A program may import another's options, and nothing imports an old name
        allowed = allowed or (room == "" and bool(below) and below[0] in PROGRAMS and module.startswith("vlm_grpo."))
        private = other != room and name.startswith("_")
        if not allowed or private:
            found.append(f"{module}:{name}")
    return found


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


@pytest.mark.parametrize("path", modules("vlm_grpo"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_the_rooms_below(path: Path) -> None:
    name = path.relative_to(ROOT / "vlm_grpo").as_posix()
    if name == "__init__.py":
        assert not list(imported(ast.parse(path.read_text()), "vlm_grpo")), "importing the package must cost nothing"
        return
    assert place(tuple(name.split("/"))) or path.stem in PROGRAMS | SHIMS, f"give vlm_grpo/{name} a room"
    assert faults(name, path.read_text()) == []


def test_every_room_says_what_it_is_for_and_what_it_may_import() -> None:
    for room in set(BELOW) - {"tiny"}:
        words = ast.get_docstring(ast.parse((ROOT / "vlm_grpo" / room / "__init__.py").read_text())) or ""
        assert words.count("\n") <= 3 and "may import" in words, f"three lines at the top of vlm_grpo/{room}"


def test_importing_a_room_imports_nothing_but_what_users_import_from_it() -> None:
    for room in set(BELOW) - {"task", "scoring", "tiny"}:
        assert not list(imported(ast.parse((ROOT / "vlm_grpo" / room / "__init__.py").read_text()), "vlm_grpo"))


@pytest.mark.parametrize("path", modules("tasks"), ids=lambda path: str(path.relative_to(ROOT)))
def test_tasks_import_only_the_task_interface(path: Path) -> None:
    ours = {f"{m}.{n}" if m == "tasks" else m for m, n in imported(ast.parse(path.read_text()), "tasks")}
    others = {name for name in ours if not name.startswith("tasks._")}
    assert all(map(TASK_IMPORTS.fullmatch, others)), "and what tasks share lies in tasks/_*.py"


@pytest.mark.parametrize("path", modules("data_scripts"), ids=lambda path: str(path.relative_to(ROOT)))
def test_data_scripts_import_no_task_and_nothing_of_the_package(path: Path) -> None:
    names = {f"{m}.{n}" if m == "tasks" else m for m, n in imported(ast.parse(path.read_text()), "data_scripts")}
    assert [name for name in names if not name.startswith(("data_scripts", "tasks._"))] == []


@pytest.mark.parametrize("path", modules("vlm_grpo"), ids=lambda path: str(path.relative_to(ROOT)))
def test_package_names_no_task(path: Path) -> None:
    tasks = {path.stem for path in modules("tasks")} - {"__init__"}
    assert names_of_tasks(path.read_text(), tasks) == []


def test_wrong_imports_are_seen_in_every_form() -> None:
    source = """
from vlm_grpo.common.errors import UserError
import vlm_grpo.rollout.engine
from vlm_grpo import train, task
from ..model.vlm import VLM
from . import pack
from .pack import _lay
from vlm_grpo.task.interface import _check
def late():
    from vlm_grpo.algorithm.loss import policy_loss
import tasks.refcoco
from vlm_grpo import errors
"""
    found = [
        *("vlm_grpo.rollout.engine:", "vlm_grpo:train", "vlm_grpo.model.vlm:VLM", "vlm_grpo.task.interface:_check"),
        *("vlm_grpo.algorithm.loss:policy_loss", "tasks.refcoco:", "vlm_grpo:errors"),
    ]
    assert sorted(faults("tree/layout.py", source)) == sorted(found)
    assert faults("train.py", "from vlm_grpo.sft import SftConfig\nfrom vlm_grpo.tree.pack import pack\n") == []
    assert faults("train.py", "from vlm_grpo.tree.pack import _PER_TOKEN\n") == ["vlm_grpo.tree.pack:_PER_TOKEN"]


def test_names_of_tasks_are_seen_outside_docstrings() -> None:
    source = '"""As in task=chess."""\nname = "tasks/chess.py"  # chess\nf("chess")\n"a game of chess: chessboard"\n'
    assert names_of_tasks(source, {"chess"}) == ["tasks/chess.py", "chess"]


def test_old_names_of_modules_give_the_same_objects() -> None:
    from vlm_grpo import errors, mathematics, parsing, quantities, scoring, task
    from vlm_grpo.common.errors import UserError
    from vlm_grpo.scoring import mathematics as new_mathematics
    from vlm_grpo.scoring import parsing as new_parsing
    from vlm_grpo.scoring import quantities as new_quantities

    assert errors.UserError is task.UserError is scoring.UserError is UserError
    for old, new in ((parsing, new_parsing), (quantities, new_quantities), (mathematics, new_mathematics)):
        assert old.__all__ and all(getattr(old, name) is getattr(new, name) for name in old.__all__)


def test_shapes_and_types_are_checked_in_tests() -> None:
    from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages

    with pytest.raises(Exception, match=r"type-check|Type-check"):
        group_advantages(torch.zeros(3), AdvantageConfig())
