"""TextVQA from its published forms to one JSONL per split.

    python -m data_scripts.textvqa out=DIR split=val questions=TextVQA_0.5.1_val.json images=train_images
    python -m data_scripts.textvqa out=DIR split=val source=lmms-lab/textvqa

`questions` is the official JSON, `images` the folder (or .zip) of its images: train_images for train and val,
test_images for test, whose answers are not public. `source` is the data set's name on the hub, a folder of its parquet
files or of `save_to_disk`, a .parquet file, or a .tsv of VLMEvalKit; its images are written to DIR/images. `limit=N`
stops after N questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
without groups.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_scripts._vqa import Question, convert, each, hub_questions, question_of, tsv_questions
from data_scripts.writing import DataError, image_source, read_json_array, required, run_script
from tasks._hub_rows import of_textvqa

OFFICIAL = {"train": 34602, "val": 5000, "test": 5734}
UNANSWERED = ("test",)
OPTIONS = ("out", "questions", "images", "source", "split", "limit")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if options.get("source"):
        source, split = required(options, "source", "split")
        if source.endswith(".tsv"):
            return tsv_questions(Path(source), split)
        return hub_questions(source, split, lambda _, row: of_textvqa(row))
    questions, split, images = required(options, "questions", "split", "images")
    fetch = image_source(Path(images))

    def make(number: int, record: Any) -> Question:
        if record["set_name"] != split:
            raise DataError(f"{questions}: record {number} is of the split {record['set_name']!r}, not {split!r}.")
        name = f"{record['image_id']}.jpg"
        return question_of(split, of_textvqa(record), lambda: fetch(name))

    return each(read_json_array(Path(questions), "data.item"), make, questions, "TextVQA 0.5.1")


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL, UNANSWERED), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
