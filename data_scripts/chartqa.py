"""ChartQA from its published forms to one JSONL per split.

    python -m data_scripts.chartqa out=DIR split=test data="ChartQA Dataset"
    python -m data_scripts.chartqa out=DIR split=test source=lmms-lab/ChartQA
    python -m data_scripts.chartqa out=DIR split=train source=HuggingFaceM4/ChartQA

`data` is the official folder, with {split}/{split}_human.json, {split}/{split}_augmented.json and {split}/png.
`source` is a copy on the hub, a folder of its parquet files or of `save_to_disk`, a .parquet file, or a .tsv of
VLMEvalKit; its images are written to DIR/images. The splits are train, val and test; `limit=N` stops after N
questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups human and augmented.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from data_scripts._vqa import Image, Question, convert, each, hub_questions, known, tsv_questions
from data_scripts.writing import DataError, read_json_array, required, run_script

OFFICIAL = {"train": 28299, "val": 1920, "test": 2500}
KINDS = ("human", "augmented")
OPTIONS = ("out", "data", "source", "split", "limit")


def of_hub(split: str, number: int, row: Any, image: Callable[[], Image]) -> Question:
    """A row of lmms-lab/ChartQA (question, answer, type) or HuggingFaceM4/ChartQA (query, label, human_or_machine)."""
    if "query" in row:
        kind, question, answers = KINDS[row["human_or_machine"]], row["query"], known(row["label"])
    else:
        kind, question, answers = row["type"].split("_")[0], row["question"], known([row["answer"]])
    if kind not in KINDS:
        raise ValueError(f"the type {kind!r} is none of {', '.join(KINDS)}")
    return Question(split, f"{split}-{number}", image, question, answers, f"{split}-{number}", [kind])


def read(options: Mapping[str, str]) -> Iterator[Question]:
    split = required(options, "split")[0]
    if options.get("source"):
        source = options["source"]
        if source.endswith(".tsv"):
            return _of_tsv(Path(source), split)
        return hub_questions(source, split, of_hub, hub_split=split)  # HuggingFaceM4/ChartQA says val, too
    folder = Path(required(options, "data")[0]) / split
    if not folder.is_dir():
        raise DataError(f"data is {options['data']!r}, which has no folder {split!r}.")
    return chain.from_iterable(_official(folder, split, kind) for kind in KINDS)


def _official(folder: Path, split: str, kind: str) -> Iterator[Question]:
    path = folder / f"{split}_{kind}.json"

    def make(number: int, record: Any) -> Question:
        name, question_id = record["imgname"], f"{split}-{kind}-{number}"
        return Question(
            split,
            question_id,
            lambda: folder / "png" / name,
            record["query"],
            known([record["label"]]),
            question_id,
            [kind],
        )

    return each(read_json_array(path), make, path, "ChartQA")


def _of_tsv(path: Path, split: str) -> Iterator[Question]:
    """VLMEvalKit says "test_human" and "test_augmented" in its column `split`."""
    for question in tsv_questions(path, split):
        yield replace(question, groups=[kind for kind in KINDS for group in question.groups if kind in group])


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
