"""LISA-Grounding: the box of an object that a sentence only implies. VLM-R1's out-of-domain test."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks._boxes import PROTOCOLS, BoxTask, Referent, read_box
from tasks._rows import check_limit, read_rows
from vlm_grpo.task import LazySamples, Sample, UserError

QUESTION = "Please provide the bounding box coordinates of the region this sentence describes: {expression}"

# VLM-R1 adds a pixel to the boxes of RefCOCO, which are COCO's; those of LISA, made from polygons, stay as they are
LISA_PROTOCOLS = PROTOCOLS | {
    "vlm-r1": replace(
        PROTOCOLS["vlm-r1"],
        grow=0.0,
        note=PROTOCOLS["vlm-r1"].note.replace("reference boxes one pixel wider and higher; ", ""),
    )
}


class LisaGrounding(BoxTask):
    """A task with one image and a sentence that implies an object ("the part that keeps the rain off").

    The answer is the object's box, and the reward is its IoU. `data` is a folder with {split}.jsonl. `limit` is the
    maximum number of samples of a split. `protocol` is one of refcoco's protocols. `question` is the prompt's text,
    which contains {expression}.
    """

    def __init__(
        self,
        data: str | None = None,
        limit: int | None = None,
        protocol: str = "standard",
        question: str = QUESTION,
    ):
        if data is None:
            raise UserError(
                "task lisa_grounding has no data. Give task_args.data: a folder made by "
                "`python -m data_scripts.lisa_grounding` from VLM-R1's lisa_test.json and lisa_test.zip."
            )
        if protocol not in LISA_PROTOCOLS:
            raise UserError(f"task_args.protocol is {protocol!r}; accepted: {', '.join(LISA_PROTOCOLS)}")
        if "{expression}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{expression}}")
        check_limit(limit)
        self.data, self.limit, self.question = data, limit, question
        self.protocol = LISA_PROTOCOLS[protocol]
        self.metric_note = f"{self.protocol.note}; data: {data}"

    def samples(self, split: str) -> Sequence[Sample]:
        def make(row: dict[str, Any], folder: Path) -> Sample:
            question = self.question.replace("{expression}", row["expression"])
            return Sample(row["id"], [folder / row["image"]], question, Referent(read_box(row["bbox_xyxy"])))

        def read(limit: int | None) -> LazySamples:
            return read_rows(self.data, split, make, "lisa_grounding", limit, ("image", "expression", "bbox_xyxy"))

        return self.protocol_samples(read, split, self.limit)
