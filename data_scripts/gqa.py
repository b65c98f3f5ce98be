"""GQA from its published forms to one JSONL per split.

    python -m data_scripts.gqa out=DIR split=val questions=questions1.2.zip images=images
    python -m data_scripts.gqa out=DIR split=testdev source=lmms-lab/GQA

`questions` is the official zip or one of its {split}_balanced_questions.json, `images` the folder (or .zip) of its
images; the splits are train, val, testdev and test, whose answers are not public. `source` is the data set's name on
the hub, a folder with its {split}_balanced_instructions and {split}_balanced_images, or a .tsv of VLMEvalKit; its
images are written to DIR/images. `limit=N` stops after N questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups structural/… and semantic/…: the types of the official scores.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from data_scripts._vqa import Image, Question, convert, each, tsv_questions
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_bytes,
    image_source,
    load_hub,
    read_json_object,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"train": 943000, "val": 132062, "testdev": 12578, "test": 95336}
UNANSWERED = ("test",)
OPTIONS = ("out", "questions", "images", "source", "split", "limit")


def question_of(split: str, question_id: str, record: Any, image: Callable[[], Image]) -> Question:
    """One entry of the official file, or one row of the instructions of lmms-lab/GQA."""
    types = record.get("types") or {}
    groups = [f"{kind}/{types[kind]}" for kind in ("structural", "semantic") if types.get(kind)]
    answers = [record["answer"]] if record.get("answer") is not None else []
    return Question(split, question_id, image, record["question"], answers, question_id, groups)


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if options.get("source"):
        source, split = required(options, "source", "split")
        if source.endswith(".tsv"):
            return tsv_questions(Path(source), split)
        return read_hub(source, split, Path(required(options, "out")[0]), whole_number(options, "limit"))
    questions, split, images = required(options, "questions", "split", "images")
    fetch = image_source(Path(images))
    pattern = f"{split}_balanced_questions.json"
    if Path(questions).suffix == ".json" and Path(questions).name.split("_")[0] != split:
        raise DataError(f"questions is {questions!r}, which is not {pattern}, the file of split={split}.")

    def make(number: int, entry: Any) -> Question:
        question_id, record = entry
        name = f"{record['imageId']}.jpg"
        return question_of(split, question_id, record, lambda: fetch(name))

    return each(read_json_object(Path(questions), "", pattern), make, questions, "GQA")


def read_hub(source: str, split: str, out: Path, limit: int | None) -> Iterator[Question]:
    """Questions and images stand in two configurations: the images are written first, then the questions find them.

    With `limit`, only the images of the first questions are written, and no others are read once they are there.
    """

    def questions() -> Iterator[Mapping[str, Any]]:
        return islice(load_hub(source, split, f"{split}_balanced_instructions"), limit)

    wanted = None if limit is None else {str(row.get("imageId")) for row in questions()}
    elsewhere: dict[str, Path] = {}  # images that are no JPEG, of which the data set has none
    with closing(SplitWriter(out)) as images:
        for number, row in enumerate(load_hub(source, split, f"{split}_balanced_images")):
            if wanted is not None and not wanted:
                break
            if not {"id", "image"} <= set(row):
                raise DataError(f"{source}: image {number} has no id or image; it has {', '.join(row)}.")
            image_id = str(row["id"])
            if wanted is None or image_id in wanted:
                stored = images.image((image_id, image_bytes(row["image"])))
                if wanted is not None:
                    wanted.remove(image_id)
                if stored is not None and stored.path != f"images/{image_id}.jpg":
                    elsewhere[image_id] = out / stored.path
        images.problems.raise_if_any()

    def make(number: int, row: Any) -> Question:
        usual = out / "images" / f"{row['imageId']}.jpg"
        return question_of(split, str(row["id"]), row, lambda: elsewhere.get(str(row["imageId"]), usual))

    yield from each(questions(), make, source, "lmms-lab/GQA")


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL, UNANSWERED), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
