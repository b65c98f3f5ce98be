"""Writes the text of `help=true`: every option with its documentation, what it accepts and its default.

The comment above an option documents it. Options are grouped by the `ROOM` of the class that declares them. A
program's own class may list in `FIRST` the options that everyone needs; these come before all others.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator

import yaml
from omegaconf import OmegaConf

from vlm_grpo.common.options import accepted_words, hints_of

HEAD = (
    "# All options with their defaults. Change them by key=value on the command line, or in a copy of this file",
    "# named by config=FILE.yaml; the command line wins over the file. In brackets: what is accepted.",
)


def help_text(config_type: type) -> str:
    """Every option with its documentation, what it accepts and its default, as YAML to copy and change."""
    hints = hints_of(config_type)
    defaults = OmegaConf.to_container(OmegaConf.structured(config_type))
    assert isinstance(defaults, dict)
    owners = [owner for owner in reversed(config_type.__mro__) if inspect.get_annotations(owner)]
    docs = {name: doc for owner in owners for name, doc in option_docs(owner).items()}
    first: tuple[str, ...] = getattr(config_type, "FIRST", ())

    def options(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            yield from ("", *_commented(f"{docs[name]} [{accepted_words(hints[name])}]".strip()))
            yield yaml.safe_dump({name: defaults[name]}, allow_unicode=True, width=1000).rstrip()

    lines = list(HEAD)
    if first:
        lines += ["", "# ==== What everyone needs ====", *options(first)]
    for room, of_room in _rooms(owners).items():
        lines += ["", f"# ==== {room} ===="] if room else []
        for owner in of_room:
            own = [name for name in inspect.get_annotations(owner) if name not in first]
            title = ["", f"# == {first_line(owner.__doc__ or owner.__name__)} =="]
            lines += [*title, *options(own)] if own else []
    return "\n".join(lines)


def _rooms(owners: Iterable[type]) -> dict[str, list[type]]:
    """The classes that declare options, grouped by room; rooms stand in the order in which they first appear."""
    rooms: dict[str, list[type]] = {}
    for owner in owners:
        rooms.setdefault(vars(owner).get("ROOM", ""), []).append(owner)
    return rooms


def _commented(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ")


def option_docs(owner: type) -> dict[str, str]:
    """For each option that `owner` itself declares, the comment above it as one line; "" where there is no comment."""
    source = textwrap.dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef), f"{owner} is no class"
    docs = {}
    previous_end = body.lineno
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            first = statement.lineno
            while first - 1 in comments and first - 1 > previous_end:
                first -= 1
            docs[statement.target.id] = " ".join(comments[line] for line in range(first, statement.lineno))
        previous_end = statement.end_lineno or statement.lineno
    return docs


def first_line(message: object) -> str:
    """The first line of a message or docstring."""
    return str(message).strip().partition("\n")[0]
