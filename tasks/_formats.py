"""Converts rows of the common data formats for questions, images and answers into one form."""

import difflib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_grpo.common.images import open_image
from vlm_grpo.task import UserError


@dataclass(frozen=True)
class Row:
    """A row in the common form. `more` holds further values that rewards use, such as options, as the row has them."""

    id: str | None
    images: tuple[Any, ...]
    question: str
    answer: Any
    more: dict[str, Any] = field(default_factory=dict)


def form_of(row: Mapping[str, Any]) -> str | None:
    """The name of the form whose keys a row has; None if it matches no form."""
    return next((name for name, (needed, _, _) in FORMS.items() if all(_has(row, keys) for keys in needed)), None)


def _has(row: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(row.get(key) is not None for key in keys)


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


QUESTION, ANSWER, IMAGES = ("question", "problem", "query"), ("answer", "solution", "response"), ("images", "image")
OPTIONS = ("options", "choices")


def _images(row: Mapping[str, Any]) -> tuple[Any, ...]:
    images = _first(row, IMAGES)
    if images is None or images == "":
        return ()
    return tuple(images) if isinstance(images, list | tuple) else (images,)


def _check_names(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a row that has no image(s), but a key with a similar name, such as "imge"."""
    if any(key in row for key in IMAGES):
        return
    for key, value in row.items():
        name = re.sub(r"[_ -](path|file|name|url)s?$", "", str(key).casefold())
        near = difflib.get_close_matches(name, IMAGES, n=1, cutoff=0.75) and not name.endswith(("id", "ids"))
        if near and isinstance(value, str | bytes | list | dict):
            raise UserError(
                f"{where}: the row has no image or images, but {key!r}. Rename it to image or images; if the question "
                'is without an image, add "images": [].'
            )


def _plain(row: Mapping[str, Any]) -> Row:
    return Row(None, _images(row), _text(_first(row, QUESTION)), _first(row, ANSWER))


def _conversations(row: Mapping[str, Any]) -> Row:
    """A row of VLM-R1 or LLaVA: turns of "human" and "gpt". The answer, without tags, may be a number or a list."""
    question, answer = _exchange([(turn["from"], turn["value"]) for turn in row["conversations"]])
    if answer is None:
        raise KeyError("gpt")
    if isinstance(answer, str):
        answer = answer.replace("<answer>", "").replace("</answer>", "").strip()
    elif isinstance(answer, list):
        answer = json.dumps(answer, ensure_ascii=False)
    return Row(None, _images(row), question, answer, {"reward": row.get("accu_reward_method")})


def _messages(row: Mapping[str, Any]) -> Row:
    """A row of ms-swift: roles and contents. The answer is `solution` or `answer`, or else the assistant's text."""
    question, said = _exchange([(turn["role"], _content(turn["content"])) for turn in row["messages"]])
    answer = _first(row, ("solution", "answer"))
    if answer is None:
        answer = said
    if answer is None:
        raise KeyError("solution")
    return Row(None, _images(row), question, answer)


def _verl(row: Mapping[str, Any]) -> Row:
    """A row of verl: a prompt of messages, with the ground truth in `reward_model`."""
    question, _ = _exchange([(turn["role"], _content(turn["content"])) for turn in row["prompt"]])
    return Row(None, _images(row), question, row["reward_model"]["ground_truth"], {"source": row.get("data_source")})


def _exchange(turns: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
    """The question, preceded by the system's instructions, and the answer, or None if there is none.

    Raises: ValueError unless the turns are exactly one question with at most one answer.
    """
    said = [({"human": "user", "gpt": "assistant"}.get(speaker, speaker), text) for speaker, text in turns]
    system = [_text(text) for speaker, text in said if speaker == "system"]
    speakers = [speaker for speaker, _ in said[len(system) :]]
    if speakers not in (["user"], ["user", "assistant"]):
        raise ValueError(
            f"its turns are {', '.join(speaker for speaker, _ in turns)}; accepted: one question, an answer to it, and "
            "a system's instructions before them. Make a row of each question."
        )
    question = "\n".join([*(text for text in system if text.strip()), _text(said[len(system)][1])])
    return question, said[-1][1] if speakers[-1] == "assistant" else None


def _content(content: Any) -> str:
    """The text of a message, which is text or a list of parts. Each image part becomes a placeholder."""
    if isinstance(content, str):
        return content
    return "".join("<image>" if part.get("type") == "image" else _text(part.get("text") or "") for part in content)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


FORMS: dict[str, tuple[tuple[tuple[str, ...], ...], Any, str]] = {
    "conversations (VLM-R1)": ((("conversations",),), _conversations, "conversations of from/value, image(s)"),
    "verl": ((("prompt",), ("reward_model",)), _verl, "prompt of role/content, reward_model.ground_truth, images"),
    "messages (ms-swift)": ((("messages",),), _messages, "messages of role/content, images, solution"),
    "question and answer": (
        (QUESTION, ANSWER),
        _plain,
        "question, problem or query; answer, solution or response; image(s)",
    ),
}
ACCEPTED = "; ".join(f"{name}: {keys}" for name, (_, _, keys) in FORMS.items())


def read_row(row: Mapping[str, Any], form: str, where: str) -> Row:
    """A row of the given form. Raises UserError, naming the place and the accepted keys, if it has another form."""
    if form_of(row) != form:
        raise UserError(f"{where}: not a row of the form {form} ({FORMS[form][2]}); its keys are {', '.join(row)}.")
    try:
        read: Row = FORMS[form][1](row)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not of the form {form} ({FORMS[form][2]}): {error!r}") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    _check_names(row, where)
    holes = read.question.count("<image>")
    if holes and holes != len(read.images):
        raise UserError(f"{where}: the question has {holes} <image>, and the row {len(read.images)} images.")
    question = read.question.replace("<image>", "").strip()
    if not question:
        raise UserError(f"{where}: the question is empty.")
    return Row(row_id(row), read.images, question, read.answer, {**read.more, "options": _first(row, OPTIONS)})


def row_id(row: Mapping[str, Any]) -> str | None:
    """The id that a row gives itself; None if it has none."""
    given = row.get("id")
    return str(given) if isinstance(given, str | int) and not isinstance(given, bool) else None


class RowImages(Sequence):
    """The images of a row: paths, or bytes that are decoded on access."""

    def __init__(self, stored: Sequence[Any], root: Path, where: str) -> None:
        self._stored, self._root, self._where = stored, root, where

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        stored = self._stored[index]
        if isinstance(stored, str):
            return self._path(stored)
        if isinstance(stored, Mapping):
            encoded = stored.get("bytes")
            named = next((stored[key] for key in ("path", "image") if isinstance(stored.get(key), str)), None)
            if encoded is None and named is not None:
                return self._path(named)
            stored = encoded
        if not isinstance(stored, bytes):
            raise UserError(f"{self._where}: an image is a {type(stored).__name__}; it must be a path, or bytes.")
        return open_image(io.BytesIO(stored), f"{self._where}: the image")

    def _path(self, name: str) -> Path:
        return self._root / name.removeprefix("file://")
