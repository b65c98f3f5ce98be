"""What all data scripts share: checking rows, writing splits whole or not at all, and the command line.

    def convert(options):
        with SplitWriter(Path(options["out"]), whole_number(options, "limit")) as writer:
            for record in read_json_array(path, "item"):
                if not writer.take("train", record["id"]):
                    break
                image = writer.image(images(record["image"]))
                if image:
                    writer.write("train", {"id": record["id"], "image": image.path, "question": record["question"]})
        return report(writer.counts, OFFICIAL, writer.limit, "questions")

    if __name__ == "__main__":
        sys.exit(run_script(__doc__, ("out", "images", "limit"), convert, sys.argv[1:]))

Readers of files and of the hub are in data_scripts/reading.py and are also found here.
"""

import difflib
import io
import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PIL import Image

from data_scripts.reading import (
    HUB_SPLITS,
    OUR_SPLITS,
    DataError,
    image_bytes,
    image_source,
    load_hub,
    open_member,
    read_json_array,
    read_json_object,
    read_jsonl,
    read_parquet,
    read_tsv,
    require,
    some,
)

__all__ = [
    "HUB_SPLITS",
    "OUR_SPLITS",
    "DataError",
    "Problems",
    "SplitWriter",
    "StoredImage",
    "image_bytes",
    "image_source",
    "known_split",
    "load_hub",
    "open_member",
    "read_json_array",
    "read_json_object",
    "read_jsonl",
    "read_parquet",
    "read_tsv",
    "report",
    "require",
    "required",
    "run_script",
    "some",
    "whole_number",
]

UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


class Problems:
    """What is wrong with the data, by kind. Keeps every distinct case, and spells out the first few."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {}

    def add(self, kind: str, what: str) -> None:
        """Note one case of a kind, such as "images missing"."""
        self._found.setdefault(kind, {})[what] = None

    def raise_if_any(self) -> None:
        """DataError that counts the cases of each kind."""
        if self._found:
            lines = [f"{len(found)} {kind}: {some(list(found))}" for kind, found in self._found.items()]
            raise DataError("nothing was written, because of\n  " + "\n  ".join(lines))


@dataclass(frozen=True)
class StoredImage:
    """An image that decodes to its last pixel: its path from the output folder, width and height in pixels."""

    path: str
    size: tuple[int, int]


class SplitWriter:
    """Writes out/{split}.jsonl for any number of splits; used in a `with`.

    The files get their names together when the block ends, and only if no problem was found and none replaces a file
    of more rows; otherwise what was begun is deleted and files of earlier runs stay as they were. Images that come as
    bytes are written to out/images, each whole or not at all. A run after an interrupted one reads its source from the
    beginning, and writes no image again that is there already. Ids, and what is known of images, are kept in a
    temporary file, not in memory.
    """

    def __init__(self, out: Path, limit: int | None = None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.limit = out, limit
        self.problems = Problems()
        self.counts: dict[str, int] = {}
        self._num_taken: dict[str, int] = {}
        self._files: dict[str, TextIO] = {}
        self._known = sqlite3.connect("", isolation_level=None)  # a file of SQLite's own, gone when it is closed
        self._known.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE taken (split TEXT, id BLOB, PRIMARY KEY (split, id)) WITHOUT ROWID;"
            "CREATE TABLE images (key BLOB PRIMARY KEY, path BLOB, width INTEGER, height INTEGER) WITHOUT ROWID;"
        )

    def take(self, split: str, row_id: str) -> bool:
        """Whether the row is wanted: False once `limit` rows of the split were taken. Notes ids that stand twice."""
        if self.limit is not None and self._num_taken.get(split, 0) >= self.limit:
            return False
        if self._is_taken(split, row_id):
            self.problems.add("ids that stand twice", row_id)
            return True
        self._known.execute("INSERT INTO taken VALUES (?, ?)", (split, _blob(row_id)))
        self._num_taken[split] = self._num_taken.get(split, 0) + 1
        return True

    def image(self, source: Path | tuple[str, bytes]) -> StoredImage | None:
        """The image at a path, or the bytes of one with the name (without suffix) to write it under.

        None, with the problem noted, for an image that is missing or does not decode to its last pixel.
        """
        return self._file(source) if isinstance(source, Path) else self._encoded(*source)

    def write(self, split: str, row: Mapping[str, Any]) -> None:
        """Append one row, which has an "id" that was taken. Halves of characters (lone surrogates) become "?"."""
        assert self._is_taken(split, row["id"]), f"take({split!r}, {row['id']!r}) before writing it"
        if split not in self._files:
            self._files[split] = self._unfinished(split).open("w", encoding="utf-8", errors="replace")
        self._files[split].write(json.dumps(row, ensure_ascii=False) + "\n")
        self.counts[split] = self.counts.get(split, 0) + 1

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self.close()

    def close(self) -> None:
        """Ends without giving any split its name; images stay. `with` calls it."""
        self._known.close()
        for split, file in self._files.items():
            file.close()
            self._unfinished(split).unlink(missing_ok=True)

    def _finish(self) -> None:
        self.problems.raise_if_any()
        if not self.counts:
            raise DataError("nothing was written, because the source holds no row.")
        for split in self._files:
            self._keep_longer(split)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        for split in self._files:
            self._unfinished(split).replace(self.out / f"{split}.jsonl")

    def _keep_longer(self, split: str) -> None:
        """DataError if the split is there with more rows than were written now."""
        path = self.out / f"{split}.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as lines:
            there = sum(1 for line in lines if line.strip())
        if there > self.counts[split]:
            given = "" if self.limit is None else f" with limit={self.limit}"
            raise DataError(
                f"nothing was written, because {path} has {there:,} rows, and this run{given} would leave "
                f"{self.counts[split]:,} of them; give another out=…, or delete that file first."
            )

    def _unfinished(self, split: str) -> Path:
        return self.out / f"{split}.jsonl.part"

    def _is_taken(self, split: str, row_id: str) -> bool:
        query = "SELECT 1 FROM taken WHERE split = ? AND id = ?"
        return self._known.execute(query, (split, _blob(row_id))).fetchone() is not None

    def _file(self, path: Path) -> StoredImage | None:
        key = str(path)
        if not path.is_file():
            self.problems.add("images missing", key)
            return None
        return self._looked_at(key, lambda: self._checked(path, key))[0]

    def _encoded(self, name: str, encoded: bytes) -> StoredImage | None:
        try:
            with Image.open(io.BytesIO(encoded)) as opened:
                suffix = (opened.format or "png").lower().replace("jpeg", "jpg")
        except UNREADABLE as error:
            self.problems.add("images that cannot be opened", f"{name} ({error})")
            return None
        path = self.out / "images" / (re.sub(r"[^\w.-]", "_", name) + f".{suffix}")
        there = path.is_file() and path.stat().st_size == len(encoded) and path.read_bytes() == encoded
        image, is_new = self._looked_at(str(path), lambda: self._checked(path, name, encoded))
        if not is_new and not there:
            self.problems.add("names that two different images have", name)
        if is_new and image and not there:
            _write_whole(path, encoded)
        return image

    def _looked_at(self, key: str, look: Callable[[], StoredImage | None]) -> tuple[StoredImage | None, bool]:
        """The image of a key, which is looked at once only; and whether it was now."""
        query = "SELECT path, width, height FROM images WHERE key = ?"
        if row := self._known.execute(query, (_blob(key),)).fetchone():
            path, width, height = row
            return None if path is None else StoredImage(_text(path), (width, height)), False
        image = look()
        facts = (None, 0, 0) if image is None else (_blob(image.path), *image.size)
        self._known.execute("INSERT INTO images VALUES (?, ?, ?, ?)", (_blob(key), *facts))
        return image, True

    def _checked(self, path: Path, name: str, encoded: bytes | None = None) -> StoredImage | None:
        try:
            with Image.open(path if encoded is None else io.BytesIO(encoded)) as image:
                image.load()
                return StoredImage(Path(os.path.relpath(path, self.out)).as_posix(), image.size)
        except UNREADABLE as error:
            self.problems.add("images that cannot be opened", f"{name} ({error})")
            return None


def _blob(text: str) -> bytes:
    """Any text, halves of characters too."""
    return text.encode("utf-8", "surrogatepass")


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


# ---- the command ----


def report(
    counts: Mapping[str, int], official: Mapping[str, int], limit: int | None, noun: str, every: bool = True
) -> list[str]:
    """One line per split: what was written, beside the official count; with `every`, also the splits not written."""
    lines = []
    for split, count in counts.items():
        known = official.get(split)
        beside = "no official count known" if known is None else f"official {known:,}"
        note = "" if known == count else f", limit={limit}" if limit is not None else ", DIFFERS" if known else ""
        lines.append(f"{split}: {count:,} {noun} ({beside}{note})")
    if every and limit is None:
        lines += [f"{split}: not in the source" for split in official if split not in counts]
    return lines


def required(options: Mapping[str, str], *names: str) -> list[str]:
    """The values of options that must be given."""
    for name in names:
        if not options.get(name):
            raise DataError(f"{name}=… is missing; help=true shows how the script is used.")
    return [options[name] for name in names]


def whole_number(options: Mapping[str, str], name: str, fewest: int = 1) -> int | None:
    """The option as a whole number of at least `fewest`; None where it is not given."""
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value) < fewest:
        raise DataError(f"{name} is {value!r}; accepted: a whole number from {fewest}")
    return int(value)


def known_split(options: Mapping[str, str], splits: Collection[str]) -> str | None:
    """The option `split`; None where it is not given. Raises DataError that names the splits if it is none of them."""
    value = options.get("split")
    if value and value not in splits:
        raise DataError(f"split is {value!r}; accepted: {', '.join(splits)}{_nearest(value, splits)}")
    return value or None


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def run_script(
    doc: str | None, options: Collection[str], convert: Callable[[Mapping[str, str]], list[str]], argv: Sequence[str]
) -> int:
    """Runs `convert` on the options of a command line and prints the lines it gives; the exit code.

    Accepts key=value, --key=value and --key value, and help, help=true and -h. 0 on success, 2 with a message for what
    the user can correct, 130 where the user interrupted.
    """
    given: dict[str, str] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if argument.removeprefix("--") in ("-h", "h", "help", "help=true"):
            print(doc)
            return 0
        if not equals and argument.startswith("--") and key in options and rest:
            equals, value = "=", rest.pop(0)
        if not equals or key not in options:
            accepted = ", ".join(f"{k}=…" for k in (*options, "help"))
            print(
                f"error: unknown argument {argument!r}; accepted: {accepted}{_nearest(key, options)}", file=sys.stderr
            )
            return 2
        given[key] = value
    try:
        print("\n".join(convert(given)))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: no split was written; images that were are used by the next run", file=sys.stderr)
        return 130
    return 0
