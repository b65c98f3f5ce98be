"""Readers of the forms in which data sets are published. All stream: memory holds a row, a few rows, or offsets."""

import base64
import binascii
import csv
import gzip
import json
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which Windows puts before UTF-8, and ijson does not read
MOST_NAMED = 5  # problems of a kind that a message spells out
DAMAGED = (zipfile.BadZipFile, EOFError, gzip.BadGzipFile, zlib.error, RuntimeError)  # RuntimeError: a password
HUB_SPLITS = {"val": "validation"}  # what most data sets on the hub call a split that we call otherwise
OUR_SPLITS = {theirs: ours for ours, theirs in HUB_SPLITS.items()}
PARQUET_ROWS = 16  # decoded at a time; rows may hold an image of several MB


class DataError(Exception):
    """The source data is not as it must be; the message is for the user."""


def some(items: Sequence[Any]) -> str:
    """The first few items, and how many more there are."""
    more = f", and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return ", ".join(str(item) for item in items[:MOST_NAMED]) + more


def require(paths: Iterable[Path]) -> None:
    """DataError that names the files that are missing, if any."""
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"missing: {', '.join(missing)}")


@contextmanager
def open_member(path: Path, pattern: str = "*") -> Iterator[BinaryIO]:
    """A file as it is, a .gz unpacked, or the one member of a .zip whose name without folders matches `pattern`."""
    require([path])
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [name for name in _files_of(archive) if fnmatch(name.rsplit("/", 1)[-1], pattern)]
                if len(names) != 1:
                    found = some(names) or "none"
                    raise DataError(f"{path} must hold one file called {pattern}; it holds {found}.")
                with archive.open(names[0]) as file:
                    yield file  # type: ignore[misc]
        elif path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        else:
            with path.open("rb") as file:
                yield file
    except DAMAGED as error:
        raise _damaged(path, error) from error


def _files_of(archive: zipfile.ZipFile) -> list[str]:
    """Names of an archive's files, without folders and what macOS adds."""
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    return [name for name in names if not name.startswith("__MACOSX/") and not name.endswith(".DS_Store")]


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is damaged or only half downloaded: {type(error).__name__}: {' '.join(str(error).split())}"
    )


# ---- JSON ----


def read_json_array(path: Path, prefix: str = "item", member: str = "*") -> Iterator[Any]:
    """The items of an array in a JSON file, which may lie in a .zip or .gz; see `open_member`.

    `prefix` is ijson's: "item" for an array that is the whole file, "questions.item" for one under a key.
    """
    yield from _json(path, member, prefix, lambda ijson, file: ijson.items(file, prefix, use_float=True))


def read_json_object(path: Path, prefix: str = "", member: str = "*") -> Iterator[tuple[str, Any]]:
    """The keys and values of an object in a JSON file, one after the other; see `read_json_array`."""
    yield from _json(path, member, prefix, lambda ijson, file: ijson.kvitems(file, prefix, use_float=True))


def _json(path: Path, member: str, prefix: str, parse: Callable[[Any, BinaryIO], Iterable[Any]]) -> Iterator[Any]:
    import ijson

    nothing = True
    with open_member(path, member) as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        try:
            for item in parse(ijson, file):
                nothing = False
                yield item
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
    if nothing:
        raise DataError(f"{path} holds nothing at {prefix or 'its top level'!r}: it is empty or in another form.")


def read_jsonl(path: Path, member: str = "*") -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object per line; empty lines are skipped."""
    with open_member(path, member) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not a JSON object: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: not a JSON object, but a {type(row).__name__}.")
            yield row


# ---- TSV with images ----

SHORTEST_IMAGE = 65  # characters of base64; anything shorter is the index of the row that has the image


def read_tsv(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a TSV as VLMEvalKit makes them. All values are text, but row["image"] is a list of image bytes.

    The field `image` holds base64, a Python list of base64, or the `index` of another row whose image this one shares.
    """
    require([path])
    limit = csv.field_size_limit(sys.maxsize)  # csv refuses fields above 128 KiB; the limit is one for the process
    try:
        with path.open("rb") as file:
            starts: dict[str, int] = {}
            for number, (start, row) in enumerate(_tsv_rows(file, path), start=1):
                starts[row.get("index", "")] = start
                try:
                    row["image"] = _tsv_images(row.get("image") or "", path, starts)
                except (ValueError, binascii.Error) as error:
                    raise DataError(f"{path}: row {number}: the image cannot be decoded: {error}") from error
                yield row
    finally:
        csv.field_size_limit(limit)


def _tsv_rows(file: BinaryIO, path: Path, header: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Byte offset and fields of each row from where the file stands; the first is the header, unless one is given."""
    position = file.tell()

    def lines() -> Iterator[str]:
        nonlocal position
        while line := file.readline():
            position += len(line)
            yield line.decode("utf-8-sig" if position == len(line) else "utf-8")

    reader = csv.reader(lines(), delimiter="\t")
    names = list(header)
    try:
        start = position
        for fields in reader:
            if not names:
                names = fields
            elif fields:
                if len(fields) != len(names):
                    raise DataError(
                        f"{path}: line {reader.line_num}: {len(fields)} fields, where {len(names)} are named."
                    )
                yield start, dict(zip(names, fields, strict=True))
            start = position
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _tsv_images(field: str, path: Path, starts: dict[str, int]) -> list[bytes]:
    if not field:
        return []
    if field.startswith("["):
        return [base64.b64decode(one.strip("'\" "), validate=True) for one in field.strip("[]").split(",")]
    if len(field) >= SHORTEST_IMAGE:
        return [base64.b64decode(field, validate=True)]
    if field not in starts:
        starts |= _tsv_starts(path)
    if field not in starts:
        raise DataError(f"{path}: a row shares the image of row {field!r}, which is not there.")
    with path.open("rb") as file:
        names = next(csv.reader([file.readline().decode("utf-8-sig")], delimiter="\t"))
        file.seek(starts[field])
        _, row = next(_tsv_rows(file, path, names))
    if len(row["image"]) < SHORTEST_IMAGE:
        raise DataError(f"{path}: a row shares the image of row {field!r}, which has none of its own.")
    return [base64.b64decode(row["image"], validate=True)]


def _tsv_starts(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        return {row.get("index", ""): start for start, row in _tsv_rows(file, path)}


# ---- parquet and the hub ----


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, a few at a time; image columns are {"bytes", "path"}, see `image_bytes`."""
    import pyarrow
    import pyarrow.parquet

    require([path])
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise _damaged(path, error) from error


def load_hub(source: str, split: str, config: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one split, images not decoded; see `image_bytes`.

    `source` is a .parquet, .json, .jsonl or .tsv file, a folder of `save_to_disk`, a folder of parquet shards named
    after their splits ("train-00000-of-00004.parquet"), or a data set's name on the hub, which is streamed. Of a folder
    with a sub-folder for each configuration, as a cloned repository has, that of `config` is read.
    """
    path = Path(source)
    if config and (path / config).is_dir():
        path = path / config
    readers = {".parquet": read_parquet, ".jsonl": read_jsonl, ".json": read_json_array, ".tsv": read_tsv}
    if path.suffix in readers:
        return _objects(readers[path.suffix](path), source)
    if path.is_dir() and not any(path.glob("dataset_*.json")):
        return _shards(path, split)
    return _loaded(str(path), split, config)


def _objects(rows: Iterable[Any], source: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{source}: row {number} is no object, but a {type(row).__name__}.")
        yield row


def _shards(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    every = sorted(folder.rglob("*.parquet"))
    chosen = [path for path in every if path.name.startswith((f"{split}-", f"{split}.", f"{split}_"))]
    if not chosen:
        found = some([str(path.relative_to(folder)) for path in every]) or "none"
        raise DataError(f"{folder} has no parquet file of split {split!r}; the files there: {found}.")
    places = sorted({str(path.parent.relative_to(folder)) for path in chosen})
    if len(places) > 1:
        raise DataError(
            f"{folder} has files of split {split!r} in several sub-folders, which may be different data sets: "
            f"{some(places)}. Give the one that is meant, such as {folder / places[0]}."
        )
    for path in chosen:
        yield from read_parquet(path)


def _loaded(source: str, split: str, config: str | None) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        if Path(source).is_dir():
            loaded: Any = datasets.load_from_disk(source)
        else:
            loaded = datasets.load_dataset(source, config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{source}: split {split!r} cannot be read: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{source} has no split {split!r}; it has {', '.join(map(str, loaded))}.")
        loaded = loaded[split]
    for batch in loaded.with_format("arrow").iter(PARQUET_ROWS):  # images stay as they are stored, in lists, too
        yield from batch.to_pylist()


def image_bytes(stored: Any) -> bytes:
    """The encoded image in a row's image column: bytes, or {"bytes", "path"} with one of them missing."""
    if isinstance(stored, bytes):
        return stored
    try:
        if stored["bytes"] is not None:
            return stored["bytes"]
        return Path(stored["path"]).read_bytes()
    except (TypeError, KeyError) as error:
        raise DataError(f"a row's image is a {type(stored).__name__}; it must be bytes or a path.") from error


# ---- images ----


def image_source(images: Path) -> Callable[[str], Path | tuple[str, bytes]]:
    """A function from an image's name in the annotations to what `SplitWriter.image` takes.

    `images` is a folder that the names start from, or a .zip whose members end in them; those are then written out.
    """
    if images.is_dir():
        return lambda name: images / name
    if images.suffix != ".zip":
        raise DataError(f"images is {str(images)!r}; give the folder of the images, or a .zip, as images=….")
    require([images])
    try:
        archive = zipfile.ZipFile(images)
    except zipfile.BadZipFile as error:
        raise _damaged(images, error) from error
    members: dict[str, list[str]] = {}
    for member in _files_of(archive):
        members.setdefault(member.rsplit("/", 1)[-1], []).append(member)

    def read(name: str) -> Path | tuple[str, bytes]:
        found = [one for one in members.get(name.rsplit("/", 1)[-1], []) if f"/{one}".endswith(f"/{name}")]
        if len(found) > 1:
            raise DataError(f"{images}: several members end in {name!r}: {some(found)}. Unpack it and give the folder.")
        if not found:
            return images / name  # reported as missing
        try:
            return str(Path(name).with_suffix("")), archive.read(found[0])
        except (*DAMAGED, OSError) as error:
            raise _damaged(images, error) from error

    return read
