"""Counting questions of CLEVR from their published forms to one JSONL per split.

    python -m data_scripts.clevr_count out=DIR split=val questions=CLEVR_val_questions.json images=images/val
    python -m data_scripts.clevr_count out=DIR split=train source=leonardPKU/clevr_cogen_a_train

`questions` is CLEVR's JSON of a split (train or val: the programs of test are not public), `images` the folder (or
.zip) of its images; only questions whose program ends in counting are taken. `source` is R1-V's and VLM-R1's rows
(image, problem, solution in answer tags): the data set's name on the hub, a folder of its parquet files or of
`save_to_disk`, or a .parquet file; its images are written to DIR/images. `limit=N` stops after N questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
without groups; the answer is a whole number.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_scripts._vqa import Question, convert, each, hub_questions
from data_scripts.writing import image_source, read_json_array, required, run_script
from tasks._hub_rows import Asked

OFFICIAL = {"train": 70000}  # rows of clevr_cogen_a_train; CLEVR's paper does not count its counting questions
OPTIONS = ("out", "questions", "images", "source", "split", "limit")
_SOLUTION = re.compile(r"\s*<answer>\s*(\d+)\s*</answer>\s*|\s*(\d+)\s*")


def of_hub(split: str, number: int, row: Any) -> Asked:
    """A row of clevr_cogen_a_train."""
    found = _SOLUTION.fullmatch(row["solution"])
    if found is None:
        raise ValueError(f"the solution is {row['solution']!r}, not <answer> NUMBER </answer>")
    question = re.sub(r"\s*<image>\s*", "", row["problem"])
    return Asked(question, [found[1] or found[2]], f"{split}-{number}")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if options.get("source"):
        source, split = required(options, "source", "split")
        return hub_questions(source, split, partial(of_hub, split))
    questions, split, images = required(options, "questions", "split", "images")
    fetch = image_source(Path(images))

    def make(number: int, record: Any) -> Question | None:
        if record["split"] != split:
            raise ValueError(f"its split is {record['split']!r}, not {split!r}")
        last = record["program"][-1]
        if last.get("function", last.get("type")) != "count":
            return None
        name, question_id = record["image_filename"], record["question_index"]
        answer = str(int(record["answer"]))
        return Question(split, str(question_id), lambda: fetch(name), record["question"], [answer], question_id)

    return each(read_json_array(Path(questions), "questions.item"), make, questions, "CLEVR")


def main(arguments: Sequence[str]) -> int:
    return run_script(
        __doc__,
        OPTIONS,
        lambda options: convert(options, read, OFFICIAL if options.get("source") else {}, splits=("train", "val")),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
