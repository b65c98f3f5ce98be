"""Geometry3K from its published forms to one JSONL per split.

    python -m data_scripts.geometry3k out=DIR data=geometry3k
    python -m data_scripts.geometry3k out=DIR data=hiyouga/geometry3k split=train

`data` is the original folder, {train,val,test}/NUMBER/data.json with img_diagram.png beside it (problem_text, choices,
answer as a letter); or rows of hiyouga/geometry3k (images, problem, answer, and choices in its later versions): the
name on the hub, a folder of its parquet shards or of `save_to_disk`, or a .parquet file; their images are written to
DIR/images.

Each line of DIR/{split}.jsonl is {"id", "image", "problem", "answer"}, and "choices" where the source has them, one of
which is the answer. `split` chooses one split, `limit=N` stops after N problems of each.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from data_scripts.writing import (
    HUB_SPLITS,
    OUR_SPLITS,
    DataError,
    SplitWriter,
    image_bytes,
    known_split,
    load_hub,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"train": 2101, "val": 300, "test": 601}
OPTIONS = ("out", "data", "split", "limit")
Record = tuple[str, dict[str, Any], Path | tuple[str, bytes]]  # split, row without image, image


def read_folder(folder: Path, split: str | None) -> Iterator[Record]:
    """The problems of the original release, in the order of their numbers."""
    for name in [split] if split else list(OFFICIAL):
        numbers = sorted(
            (path.parent for path in (folder / name).glob("*/data.json")), key=lambda p: (len(p.name), p.name)
        )
        if not numbers:
            raise DataError(f"{folder / name} has no NUMBER/data.json.")
        for problem in numbers:
            path = problem / "data.json"
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                choices = [str(choice) for choice in record["choices"]]
                row = {
                    "problem": record["problem_text"],
                    "choices": choices,
                    "answer": choices[list("ABCD").index(record["answer"])],
                }
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise DataError(
                    f"{path}: not of the form of Geometry3K (problem_text, choices, answer): {error!r}"
                ) from error
            yield name, {"id": f"{name}-{problem.name}", **row}, problem / "img_diagram.png"


def read_rows(source: str, split: str) -> Iterator[Record]:
    """Rows of hiyouga/geometry3k."""
    name = OUR_SPLITS.get(split, split)
    for number, record in enumerate(load_hub(source, HUB_SPLITS.get(split, split))):
        row_id = f"{name}-{number}"
        try:
            (stored,) = record["images"]
            row = {
                "id": row_id,
                "problem": record["problem"].replace("<image>", "").strip(),
                "answer": "" if record["answer"] is None else str(record["answer"]),
            }
            if record.get("choices"):
                row["choices"] = [str(choice) for choice in record["choices"]]
            yield name, row, (row_id, image_bytes(stored))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{source}, row {number}: not of the form images (one), problem, answer: {error!r}"
            ) from error


def convert(options: Mapping[str, str]) -> list[str]:
    """Reads, checks and writes as the options say; the lines to print."""
    out, source = required(options, "out", "data")
    split, limit = known_split(options, (*OFFICIAL, "validation")), whole_number(options, "limit")
    original = any((Path(source) / name).is_dir() for name in OFFICIAL)
    if not original and split is None:
        raise DataError("split=… is missing: which split of the rows?")
    records = read_folder(Path(source), split) if original else islice(read_rows(source, str(split)), limit)
    with SplitWriter(Path(out), limit) as writer:
        for name, row, stored in records:
            if not writer.take(name, row["id"]):
                continue
            image = writer.image(stored)
            if not row["answer"].strip():
                writer.problems.add("problems without an answer", f"{row['id']} of {source}")
            elif row["answer"] not in row.get("choices", [row["answer"]]):
                writer.problems.add("answers that are none of the choices", f"{row['id']} of {source}")
            if image:
                writer.write(name, {"id": row.pop("id"), "image": image.path, **row})
    return report(writer.counts, OFFICIAL, writer.limit, "problems", every=False)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
