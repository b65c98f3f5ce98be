"""Files of rows, read one row at a time: JSON lines, a JSON array, parquet, and manifests of such files."""

import json
import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks._formats import row_id
from vlm_grpo.task import UserError

SUFFIXES = (".jsonl", ".json", ".parquet", ".yaml", ".yml")


class Table:
    """The rows of one file. Only offsets are in memory, except for a JSON array, which is read whole."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.root = path, root

    def __len__(self) -> int:
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a row, for error messages."""
        return f"{self.path}, row {index + 1}"

    def rows(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self.row(index)

    def ids(self) -> list[str | None]:
        """The id of each row; None for a row that has none."""
        return [row_id(row) for row in self.rows()]


class Lines(Table):
    """The rows of a file with one JSON object per line."""

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
    """The rows of a file that is a JSON array of objects."""

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
    """The rows of a parquet file, read one row group at a time."""

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
            return [row_id(row) for row in file.read(columns=["id"]).to_pylist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": (-1, None)}


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object, but a {type(row).__name__}.")
    return row


@dataclass(frozen=True)
class Part:
    """The rows of a table that a data set uses, in order."""

    table: Table
    indices: Sequence[int]


def open_parts(path: Path, root: Path | None, seed: int) -> list[Part]:
    """The rows of a data file, or of the files that a manifest lists.

    Image paths are relative to `root`; if that is None, to the manifest's `data_root`, or else to the file's folder.
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
    """The path of a file that a manifest lists: absolute, or relative to the first of `folders` that contains it."""
    tried = [folder / name for folder in folders if folder is not None]
    return next((path for path in tried if path.is_file()), tried[0])


def _sampled(count: int, strategy: Any, where: str, seed: int) -> Sequence[int]:
    """Indices of the rows, out of `count`, that a sampling strategy of VLM-R1's manifests takes.

    Percentages are rounded up, as VLM-R1 does.
    """
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
