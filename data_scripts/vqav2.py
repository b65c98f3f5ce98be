"""VQAv2 from its published forms to one JSONL per split.

    python -m data_scripts.vqav2 out=DIR split=val questions=v2_Questions_Val_mscoco.zip \\
        annotations=v2_Annotations_Val_mscoco.zip images=val2014
    python -m data_scripts.vqav2 out=DIR split=val source=lmms-lab/VQAv2

`questions` and `annotations` are the official zips or the JSON files in them, `images` the folder (or .zip) of COCO's
images; the splits are train, val, test-dev and test, the last two without annotations. `source` is the data set's name
on the hub, a folder of its parquet files or of `save_to_disk`, a .parquet file, or a .tsv of VLMEvalKit; its images
are written to DIR/images. `limit=N` stops after N questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups answer_type/… and question_type/….
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_scripts._vqa import Question, convert, hub_questions, read_vqa, tsv_questions
from data_scripts.writing import required, run_script
from tasks._hub_rows import of_vqa

OFFICIAL = {"train": 443757, "val": 214354, "test-dev": 107394, "test": 447793}
SUBTYPES = {"train": "train2014", "val": "val2014", "test-dev": "test-dev2015", "test": "test2015"}
UNANSWERED = ("test-dev", "test")
OPTIONS = ("out", "questions", "annotations", "images", "source", "split", "limit")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if not options.get("source"):
        return read_vqa(options, SUBTYPES, UNANSWERED)
    source, split = required(options, "source", "split")
    if source.endswith(".tsv"):
        return tsv_questions(Path(source), split)
    hub_split = {"test-dev": "testdev"}.get(split)
    return hub_questions(source, split, lambda _, row: of_vqa(row, row), hub_split=hub_split)


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL, UNANSWERED), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
