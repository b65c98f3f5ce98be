"""DocVQA (single page) from its published forms to one JSONL per split.

    python -m data_scripts.docvqa out=DIR split=val questions=val_v1.0_withQT.json images=spdocvqa_images
    python -m data_scripts.docvqa out=DIR split=val source=lmms-lab/DocVQA

`questions` is the official JSON, with or without question types, `images` the folder (or .zip) of its page images; the
answers of test are not public. `source` is the data set's name on the hub, a folder of its parquet files or of
`save_to_disk`, a .parquet file, or a .tsv of VLMEvalKit; its images are written to DIR/images. `limit=N` stops after N
questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups question_type/….
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_scripts._vqa import Question, convert, each, hub_questions, question_of, tsv_questions
from data_scripts.writing import DataError, image_source, read_json_array, required, run_script
from tasks._hub_rows import of_docvqa

OFFICIAL = {"train": 39463, "val": 5349, "test": 5188}
CONFIG = "DocVQA"  # of lmms-lab/DocVQA, which holds another data set too
UNANSWERED = ("test",)
OPTIONS = ("out", "questions", "images", "source", "split", "limit")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if options.get("source"):
        source, split = required(options, "source", "split")
        if source.endswith(".tsv"):
            return tsv_questions(Path(source), split)
        return hub_questions(source, split, lambda _, row: of_docvqa(row), CONFIG)
    questions, split, images = required(options, "questions", "split", "images")
    folder, fetch = Path(images), image_source(Path(images))

    def make(number: int, record: Any) -> Question:
        if record["data_split"] != split:
            raise DataError(f"{questions}: record {number} is of the split {record['data_split']!r}, not {split!r}.")
        # The records say documents/NAME.png; the images are published in a folder of another name.
        name = record["image"] if (folder / record["image"]).is_file() else record["image"].rsplit("/", 1)[-1]
        return question_of(split, of_docvqa(record), lambda: fetch(name))

    return each(read_json_array(Path(questions), "data.item"), make, questions, "DocVQA")


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL, UNANSWERED), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
