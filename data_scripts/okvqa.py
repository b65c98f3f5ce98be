"""OK-VQA from its published forms to one JSONL per split.

    python -m data_scripts.okvqa out=DIR split=val questions=OpenEnded_mscoco_val2014_questions.json.zip \\
        annotations=mscoco_val2014_annotations.json.zip images=val2014
    python -m data_scripts.okvqa out=DIR split=val source=lmms-lab/OK-VQA

`questions` and `annotations` are the official zips or the JSON files in them, `images` the folder (or .zip) of COCO's
images; the splits are train and val, which the paper calls test. `source` is the data set's name on the hub, a folder
of its parquet files or of `save_to_disk`, a .parquet file, or a .tsv of VLMEvalKit; its images are written to
DIR/images. `limit=N` stops after N questions.

Each line of DIR/{split}.jsonl is {"id", "image", "question", "answers", "question_id", "groups"},
with the groups question_type/one … ten and other: the categories of the data set."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from data_scripts._vqa import Question, convert, hub_questions, read_vqa, tsv_questions
from data_scripts.writing import required, run_script
from tasks._hub_rows import of_okvqa

OFFICIAL = {"train": 9009, "val": 5046}
SUBTYPES = {"train": "train2014", "val": "val2014"}  # lmms-lab names its split val2014 too
OPTIONS = ("out", "questions", "annotations", "images", "source", "split", "limit")


def read(options: Mapping[str, str]) -> Iterator[Question]:
    if not options.get("source"):
        return read_vqa(options, SUBTYPES, ())
    source, split = required(options, "source", "split")
    if source.endswith(".tsv"):
        return tsv_questions(Path(source), split)
    return hub_questions(source, split, lambda _, row: of_okvqa(row), hub_split=SUBTYPES.get(split))


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, lambda options: convert(options, read, OFFICIAL), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
