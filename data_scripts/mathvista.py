"""MathVista from its published forms to one JSONL per split.

    python -m data_scripts.mathvista out=DIR data=AI4Math/MathVista split=testmini
    python -m data_scripts.mathvista out=DIR data=data/testmini.json images=.

`data` is rows of AI4Math/MathVista: the name on the hub, a folder of its parquet shards or of `save_to_disk`, or a
.parquet file, whose images are written to DIR/images; or the official JSON object (pid: record), with `images` the
folder that holds its "images/1.jpg". The split is testmini (1,000) or test (5,141, published without answers, which can
be answered but not scored). `limit=N` stops after N problems.

Each line of DIR/{split}.jsonl has the published keys: "id" (the pid), "image", "question", "query" (the official
prompt), "choices", "unit", "precision", "answer", "question_type", "answer_type", "metadata".
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_bytes,
    image_source,
    known_split,
    load_hub,
    read_json_object,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"testmini": 1000, "test": 5141}
UNANSWERED = "test"
OPTIONS = ("out", "data", "images", "split", "limit")
KEYS = ("question", "query", "choices", "unit", "precision", "answer", "question_type", "answer_type", "metadata")


def read(options: Mapping[str, str], split: str) -> Iterator[tuple[dict[str, Any], Path | tuple[str, bytes]]]:
    """Rows without their images, and these, in the source's order."""
    source = options["data"]
    is_official = source.endswith(".json")
    fetch = image_source(Path(required(options, "images")[0])) if is_official else None
    entries: Iterable[Any] = read_json_object(Path(source)) if is_official else load_hub(source, split)
    for number, entry in enumerate(entries):
        try:
            pid, record = entry if is_official else (entry["pid"], entry)
            row = {"id": str(pid), **{key: record.get(key) for key in KEYS}, "question_type": record["question_type"]}
            stored = fetch(record["image"]) if fetch else (f"{split}-{pid}", image_bytes(record["decoded_image"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{source}, row {number}: not of the form of MathVista: {error!r}") from error
        yield row, stored


def convert(options: Mapping[str, str]) -> list[str]:
    """Reads, checks and writes as the options say; the lines to print."""
    out, source = required(options, "out", "data")
    split = known_split(options, OFFICIAL) or (Path(source).stem if Path(source).stem in OFFICIAL else "testmini")
    unanswered = 0
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for row, stored in read(options, split):
            if not writer.take(split, row["id"]):
                break
            image = writer.image(stored)
            unanswered += not row["answer"]
            if split != UNANSWERED and not row["answer"]:
                writer.problems.add(f"problems of {split} without an answer", f"{row['id']} of {source}")
            is_choice = row["question_type"] == "multi_choice"
            if is_choice and row["answer"] and row["answer"] not in (row["choices"] or []):
                writer.problems.add("answers that are none of the choices", row["id"])
            if image:
                writer.write(split, {"id": row.pop("id"), "image": image.path, **row})
    lines = report(writer.counts, OFFICIAL, writer.limit, "problems", every=False)
    return [*lines, f"{unanswered:,} of them without an answer"] if unanswered else lines


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
