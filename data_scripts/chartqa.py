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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from data_scripts._vqa import Question, convert, each, hub_questions, tsv_questions
from data_scripts.writing import DataError, read_json_array, required, run_script
from tasks._hub_rows import CHART_KINDS, known, of_chartqa

OFFICIAL = {"train": 28299, "val": 1920, "test": 2500}
OPTIONS = ("out", "data", "source", "split", "limit")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    split = required(options, "split")[0]
    if options.get("source"):
        source = options["source"]
        if source.endswith(".tsv"):
            return _of_tsv(Path(source), split)
        return hub_questions(
            source, split, partial(of_chartqa, split), hub_split=split
        )  # HuggingFaceM4/ChartQA says val, too
    folder = Path(required(options, "data")[0]) / split
    if not folder.is_dir():
        raise DataError(f"data is {options['data']!r}, which has no folder {split!r}.")
    return chain.from_iterable(_official(folder, split, kind) for kind in CHART_KINDS)


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
        yield replace(question, groups=[kind for kind in CHART_KINDS for group in question.groups if kind in group])


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
