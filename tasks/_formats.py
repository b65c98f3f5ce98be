"""Rows of the forms in which people keep questions, images and answers, read one by one and brought into one form."""

import difflib
import io
import json
import math
import random
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_grpo.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet", ".yaml", ".yml")


@dataclass(frozen=True)
class Row:
    """A row in the one form; `more` holds what else may choose or feed a reward, as it stands there: options, …"""

    id: str | None
    images: tuple[Any, ...]
    question: str
    answer: Any
    more: dict[str, Any] = field(default_factory=dict)


# ---- forms of rows ----


def form_of(row: Mapping[str, Any]) -> str | None:
    """The name of the form whose keys a row has; None for none."""
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
    """Raises UserError for a row without image(s) that has something under a name much like it, such as "imge"."""
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
    """VLM-R1's and LLaVA's: turns of "human" and "gpt", whose answer, without its tags, may be a number or a list."""
    question, answer = _exchange([(turn["from"], turn["value"]) for turn in row["conversations"]])
    if answer is None:
        raise KeyError("gpt")
    if isinstance(answer, str):
        answer = answer.replace("<answer>", "").replace("</answer>", "").strip()
    elif isinstance(answer, list):
        answer = json.dumps(answer, ensure_ascii=False)
    return Row(None, _images(row), question, answer, {"reward": row.get("accu_reward_method")})


def _messages(row: Mapping[str, Any]) -> Row:
    """ms-swift's: roles and contents; the answer is `solution` or `answer`, or else the assistant's words."""
    question, said = _exchange([(turn["role"], _content(turn["content"])) for turn in row["messages"]])
    answer = _first(row, ("solution", "answer"))
    if answer is None:
        answer = said
    if answer is None:
        raise KeyError("solution")
    return Row(None, _images(row), question, answer)


def _verl(row: Mapping[str, Any]) -> Row:
    """verl's: a prompt of messages, and the truth in `reward_model`."""
    question, _ = _exchange([(turn["role"], _content(turn["content"])) for turn in row["prompt"]])
    return Row(None, _images(row), question, row["reward_model"]["ground_truth"], {"source": row.get("data_source")})


def _exchange(turns: Sequence[tuple[str, Any]]) -> tuple[str, Any]:
    """The question, behind the instructions of the system, and what is answered, None where nothing is.

    Raises ValueError for turns that are not one exchange, since a task asks one question.
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
    """Text, or the texts among the parts of a message, each image a placeholder."""
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
    "question and answer": ((QUESTION, ANSWER), _plain, "question or problem, answer or solution, image(s)"),
}
ACCEPTED = "; ".join(f"{name}: {keys}" for name, (_, _, keys) in FORMS.items())


def read_row(row: Mapping[str, Any], form: str, where: str) -> Row:
    """A row of the given form. Raises UserError, naming the place and the accepted keys, for one that is not."""
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
    return Row(_id(row), read.images, question, read.answer, {**read.more, "options": _first(row, OPTIONS)})


def _id(row: Mapping[str, Any]) -> str | None:
    given = row.get("id")
    return str(given) if isinstance(given, str | int) and not isinstance(given, bool) else None


# ---- files ----


class Table:
    """The rows of one file; only offsets are in memory, except for a JSON array, which is read whole."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root

    def __len__(self) -> int:
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a row in messages."""
        return f"{self.path}, row {index + 1}"

    def rows(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self.row(index)

    def ids(self) -> list[str | None]:
        """The rows' own ids, None where a row has none."""
        return [_id(row) for row in self.rows()]


class Lines(Table):
    """JSON objects, one a line."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path, root)
        self._offsets, self._numbers = array("q"), array("q")
        start = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._offsets.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def row(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as lines:
            lines.seek(self._offsets[index])
            return self._parse(lines.readline(), index)

    def rows(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as lines:
            for index, line in enumerate(line for line in lines if line.strip()):
                yield self._parse(line, index)

    def _parse(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            return _object(json.loads(line), self.where(index))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where(index)}: not a JSON object: {error}") from error


class JsonArray(Table):
    """The objects of a JSON array."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path, root)
        try:
            self._rows = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a JSON array: {error}") from error
        if not isinstance(self._rows, list):
            raise UserError(f"{path}: holds a {type(self._rows).__name__}, where a JSON array of rows is expected.")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return _object(self._rows[index], self.where(index))


class Parquet(Table):
    """Rows of a parquet file, read a row group at a time."""

    def __init__(self, path: Path, root: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        super().__init__(path, root)
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path}: not a parquet file: {error}") from error
        self._starts = [sum(counts[:group]) for group in range(len(counts) + 1)]
        self._group: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, Any]:
        import pyarrow.parquet

        group = next(g for g, end in enumerate(self._starts[1:]) if index < end)
        if self._group[0] != group:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                self._group = (group, file.read_row_group(group))
        return self._group[1].slice(index - self._starts[group], 1).to_pylist()[0]

    def ids(self) -> list[str | None]:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            if "id" not in file.schema_arrow.names:
                return [None] * len(self)
            return [_id(row) for row in file.read(columns=["id"]).to_pylist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": (-1, None)}


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object, but a {type(row).__name__}.")
    return row


@dataclass(frozen=True)
class Part:
    """The rows of a table that are used, in order."""

    table: Table
    indices: Sequence[int]


def open_parts(path: Path, root: Path | None, seed: int) -> list[Part]:
    """The rows that a file names: its own, or those of the files in a manifest.

    Image paths start at `root`, or where that is None at the manifest's `data_root`, or else at the file's folder.
    """
    if path.suffix in (".yaml", ".yml"):
        return _manifest(path, root, seed)
    table = _open_table(path, root or path.parent)
    return [Part(table, range(len(table)))]


def _open_table(path: Path, root: Path) -> Table:
    kinds: dict[str, type[Table]] = {".jsonl": Lines, ".json": JsonArray, ".parquet": Parquet}
    if path.suffix not in kinds:
        raise UserError(f"{path}: files of rows end in {', '.join(kinds)}.")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    return kinds[path.suffix](path, root)


MANIFEST = (
    'a manifest is {"datasets": [{"json_path": FILE, "sampling_strategy": "first:N" | "random:N%" | "end:N" | "all", '
    '"data_root": FOLDER}], "data_root": FOLDER}'
)


def _manifest(path: Path, root: Path | None, seed: int) -> list[Part]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    datasets = content.get("datasets") if isinstance(content, dict) else None
    if not isinstance(datasets, list) or not datasets:
        raise UserError(f"{path}: it has no list of datasets; {MANIFEST}.")
    _only(content, ("datasets", "data_root"), str(path))
    parts = []
    for number, entry in enumerate(datasets, start=1):
        where = f"{path}, dataset {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("json_path"), str):
            raise UserError(f"{where}: it has no json_path; {MANIFEST}.")
        _only(entry, ("json_path", "sampling_strategy", "data_root"), where)
        named = entry.get("data_root") or content.get("data_root")
        folder = root or (path.parent / named if named else None)
        file = _find(entry["json_path"], path.parent, folder)
        table = _open_table(file, folder or file.parent)
        parts.append(Part(table, _sampled(len(table), entry.get("sampling_strategy", "all"), where, seed + number)))
    return parts


def _only(entry: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = sorted(set(map(str, entry)) - set(keys))
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; {MANIFEST}.")


def _find(name: str, *folders: Path | None) -> Path:
    """A manifest's file: absolute, or from the manifest's folder, or from the data root."""
    tried = [folder / name for folder in folders if folder is not None]
    return next((path for path in tried if path.is_file()), tried[0])


def _sampled(count: int, strategy: Any, where: str, seed: int) -> Sequence[int]:
    """Which of `count` rows a strategy of VLM-R1's manifests takes; percentages are rounded up, as there."""
    if strategy in ("all", None):
        return range(count)
    kind, colon, amount = str(strategy).partition(":")
    digits = amount.removesuffix("%")
    if kind not in ("first", "end", "random") or not colon or not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{where}: sampling_strategy is {strategy!r}; accepted: all, first:N, random:N, end:N, or N%.")
    number = min(count, math.ceil(int(digits) * count / 100) if amount.endswith("%") else int(digits))
    if kind == "random":
        return random.Random(seed).sample(range(count), number)
    return range(number) if kind == "first" else range(count - number, count)


# ---- images ----


class RowImages(Sequence):
    """The images of a row: paths, or bytes decoded when they are asked for."""

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
        try:
            with Image.open(io.BytesIO(stored)) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{self._where}: the image cannot be read: {error}") from error

    def _path(self, name: str) -> Path:
        return self._root / name.removeprefix("file://")
