"""OCR-VQA from its published forms to one JSONL per split.

    python -m data_scripts.ocrvqa out=DIR questions=dataset.json images=images
    python -m data_scripts.ocrvqa out=DIR split=test source=howard-hou/OCR-VQA

`questions` is the official dataset.json, which holds all splits, `images` the folder (or .zip) of the covers, named
after their keys as the official downloader names them. `source` is a copy on the hub, a folder of its parquet files or
of `save_to_disk`, a .parquet file, or a .tsv of VLMEvalKit; its images are written to DIR/images. `split` chooses one
of train, val and test, `limit=N` stops after N questions of a split.

Many covers can no longer be downloaded: `on_missing=skip` leaves out, and counts, the questions whose image or answer
is not there; the default is to stop and name them.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups genre/…."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from data_scripts._vqa import HUB_SPLITS, Image, Question, tsv_questions, write_questions
from data_scripts.writing import (
    DataError,
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
from tasks._hub_rows import known

TOTAL = 1002146  # questions of all splits (arXiv: ICDAR 2019, "OCR-VQA"); the paper gives the splits in percent only
SPLITS = {1: "train", 2: "val", 3: "test"}
OPTIONS = ("out", "questions", "images", "source", "split", "limit", "on_missing")


def questions_of(
    split: str, key: str, record: Any, image: Callable[[], Image], where: str, skipped: Counter[str] | None
) -> Iterator[Question]:
    """The questions about one cover; with `skipped`, those without an answer are counted in it and left out."""
    groups = [f"genre/{record['genre']}"] if record.get("genre") else []
    for at, (question, answer) in enumerate(zip(record["questions"], record["answers"], strict=True)):
        if skipped is not None and not str(answer or "").strip():
            skipped[split] += 1
            continue
        yield Question(split, f"{key}-{at}", image, question, known([answer]), f"{key}-{at}", groups, where)


def read_official(path: Path, images: Path, wanted: str, skipped: Counter[str] | None) -> Iterator[Question]:
    """The questions of dataset.json; with `skipped`, those whose image is not there are counted in it and left out."""
    fetch = image_source(images)
    for key, record in read_json_object(path):
        try:
            split = SPLITS[record["split"]]
            name = key + PurePosixPath(record["imageURL"]).suffix
            if wanted not in ("", split):
                continue
            found = fetch(name)
            if skipped is not None and isinstance(found, Path) and not found.is_file():
                skipped[split] += len(record["questions"])
                continue
            yield from questions_of(split, key, record, lambda found=found: found, str(path), skipped)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: the entry {key!r} is not in the form of OCR-VQA: {error!r}") from error


def read_hub(source: str, split: str, skipped: Counter[str] | None) -> Iterator[Question]:
    for number, row in enumerate(load_hub(source, HUB_SPLITS.get(split, split))):
        try:
            key, stored = str(row["image_id"]), row["image"]
            fetch = lambda key=key, stored=stored: (key, image_bytes(stored))  # noqa: E731
            yield from questions_of(split, key, row, fetch, f"{source}: row {number}", skipped)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{source}: row {number} is not in the form of OCR-VQA: {error!r}") from error


def convert(options: Mapping[str, str]) -> list[str]:
    out, limit, split = (
        Path(required(options, "out")[0]),
        whole_number(options, "limit"),
        known_split(options, SPLITS.values()) or "",
    )
    on_missing = options.get("on_missing", "error")
    if on_missing not in ("error", "skip"):
        raise DataError(f"on_missing is {on_missing!r}; accepted: error, skip")
    skipped: Counter[str] = Counter()
    leave_out = skipped if on_missing == "skip" else None
    if options.get("source"):
        source, split = required(options, "source", "split")
        questions = (
            tsv_questions(Path(source), split) if source.endswith(".tsv") else read_hub(source, split, leave_out)
        )
    else:
        path, images = required(options, "questions", "images")
        questions = read_official(Path(path), Path(images), split, leave_out)
    counts = write_questions(islice(questions, limit) if split else questions, out, limit)
    lines = report(counts, {}, limit, "questions")
    lines += [
        f"{name}: {count:,} questions left out, whose image or answer is missing" for name, count in skipped.items()
    ]
    return [*lines, f"all splits: {sum(counts.values()):,} questions (official {TOTAL:,})"]


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, convert, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
