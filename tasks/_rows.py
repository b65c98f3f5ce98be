"""Samples from a folder of {split}.jsonl files, or from rows of a data set on the hub. Samples are made on access.

Memory holds only ids and offsets; rows and images stay in their files.
"""

import io
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from vlm_grpo.common.images import open_image
from vlm_grpo.task import LazySamples, Sample, UserError

if TYPE_CHECKING:
    from datasets import Dataset

_MALFORMED = (ValueError, TypeError, AttributeError, IndexError)  # what reading a row of another shape raises


def check_limit(limit: object) -> None:
    """Raise UserError unless task_args.limit is None or a whole number of at least 1."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"task_args.limit is {limit!r}; accepted: a whole number from 1, or nothing for all samples")


def read_rows(
    folder: str | Path,
    split: str,
    make: Callable[[dict[str, Any], Path], Sample],
    script: str,
    limit: int | None = None,
    keys: Sequence[str] = (),
) -> LazySamples:
    """The samples that `make(row, folder)` returns for the rows of folder/{split}.jsonl, at most `limit`.

    A row is one JSON object per line, with an "id" and all `keys`; these are checked at once for every row. When a
    sample is accessed, its row is read again and given to `make`. `script` names the data script that makes the folder.

    Raises: UserError, naming file and line, if a row is no JSON object, lacks a key or cannot be read by `make`. If the
    folder or split is missing, the error names the existing splits and the command that makes the folder.
    """
    path = _split_path(Path(folder), split, script)
    ids, offsets, numbers = _index(path, limit, ("id", *keys))

    def make_at(index: int) -> Sample:
        where = f"{path}:{numbers[index]}"
        with path.open("rb") as lines:
            lines.seek(offsets[index])
            row = _parse(lines.readline(), where)
        if row.get("id") != ids[index]:
            raise UserError(f"{where}: the file has changed since it was opened; start again.")
        try:
            return make(row, path.parent)
        except KeyError as error:
            raise UserError(f"{where}: the key {error} is missing; the row has {', '.join(row)}.") from error
        except _MALFORMED as error:
            raise UserError(f"{where}: the row cannot be read: {error}") from error

    return LazySamples(ids, make_at)


def _split_path(folder: Path, split: str, script: str) -> Path:
    command = f"python -m data_scripts.{script}"
    if not folder.is_dir():
        raise UserError(f"task_args.data is {str(folder)!r}, which is no folder. Make it with `{command}`.")
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in folder.glob("*.jsonl"))) or "none"
        raise UserError(f"{path} is missing; splits in {folder}: {there}. Make it with `{command}`.")
    return path


def _index(path: Path, limit: int | None, keys: Sequence[str]) -> tuple[list[str], array, array]:
    """The ids, byte offsets and line numbers of all rows."""
    ids: list[str] = []
    offsets, numbers = array("q"), array("q")
    start = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(ids) == limit:
                break
            if line.strip():
                row = _parse(line, f"{path}:{number}")
                missing = [key for key in keys if key not in row]
                if missing:
                    accepted = ", ".join(dict.fromkeys(keys))
                    raise UserError(f"{path}:{number}: the key {missing[0]!r} is missing; a row has {accepted}.")
                if not isinstance(row["id"], str):
                    raise UserError(f"{path}:{number}: the id is {row['id']!r}; ids are text.")
                ids.append(row["id"])
                offsets.append(start)
                numbers.append(number)
            start += len(line)
    return ids, offsets, numbers


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object, but a {type(row).__name__}.")
    return row


# ---- the hub ----


HUB_SPLITS: Mapping[str, str] = {"val": "validation"}  # what most data sets on the hub call them


def load_hub(repository: str, config: str | None, split: str, advice: str) -> "Dataset":
    """A split of a data set on the hub, or from the hub's cache.

    Raises: UserError, which ends in `advice`, if the split cannot be loaded.
    """
    import datasets

    try:
        return (
            datasets.load_dataset(repository, split=split)
            if config is None
            else datasets.load_dataset(repository, config, split=split)
        )
    except ValueError as error:
        raise UserError(f"{repository} has no split {split!r} ({error}). {advice}") from error
    except OSError as error:
        raise UserError(f"{repository} cannot be read from the hub: {error}. {advice}") from error


def read_hub_rows(
    dataset: "Dataset",
    split: str,
    id_column: str | None,
    make: Callable[[str, int, str, Mapping[str, Any], Sequence[Image.Image]], Sample],
    limit: int | None = None,
    image_column: str = "image",
) -> LazySamples:
    """The samples of a hub data set, at most `limit`; `image_column` holds the image or images of a row.

    Rows are read on access. A sample's id is the text of `id_column`, or split and row number if that is None.
    `make(id, number, split, row, images)` makes a sample; its row has no image column.
    """
    import datasets

    missing = sorted({image_column, id_column or image_column} - set(dataset.column_names))
    if missing:
        raise UserError(f"split {split!r}: rows lack {missing}; they have {dataset.column_names}.")
    images = dataset.select_columns([image_column])
    image = datasets.Image(decode=False)
    is_one = isinstance(images.features[image_column], datasets.Image)
    images = images.cast_column(image_column, image if is_one else [image])
    texts = dataset.remove_columns([image_column])
    count = min(limit or len(dataset), len(dataset))
    ids = [f"{split}-{number}" for number in range(count)]
    if id_column is not None:
        ids = [str(value) for value in dataset.select(range(count))[id_column]]

    def make_at(index: int) -> Sample:
        row: Any = texts[index]
        try:
            return make(ids[index], index, split, row, HubImages(images, index, image_column))
        except (KeyError, *_MALFORMED) as error:
            raise UserError(f"split {split!r}, row {index}: it cannot be read: {error!r}") from error

    return LazySamples(ids, make_at)


class HubImages(Sequence):
    """The images of one row, decoded on access."""

    def __init__(self, images: "Dataset", number: int, column: str = "image"):
        self._images, self._number, self._column = images, number, column

    def _stored(self) -> list[dict[str, Any]]:
        value = self._images[self._number][self._column]
        return value if isinstance(value, list) else [value]

    def __len__(self) -> int:
        return len(self._stored())

    def __getitem__(self, index: Any) -> Any:
        every = self._stored()
        if isinstance(index, slice):
            return [self[at] for at in range(len(every))[index]]
        stored = every[index]
        file = stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
        return open_image(file, f"row {self._number}: the image {stored['path']!r}")
