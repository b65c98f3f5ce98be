"""Demand: find the object in the picture that fulfils a spoken need, and name it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tasks._generated.needs import scene_row
from tasks._generated.scenes import Scene
from tasks._rows import read_rows
from tasks._scenes import checked_source, scene_samples
from vlm_grpo.scoring import Box, answer_span, box_iou
from vlm_grpo.scoring.parsing import parse_detections
from vlm_grpo.task import Reward, Sample, TaskAdapter

QUESTION = (
    "{need}\nWhich object in the image fulfils this? Answer with one JSON object: its name and its bounding box, "
    '{"label": name, "bbox_2d": [x1, y1, x2, y2]}.'
)
SCENE_QUESTION = "{need}"
LABEL_SHARE = 0.5
"""The share of the reward that a right name earns."""
HIT_IOU = 0.5


@dataclass(frozen=True)
class Thing:
    """An object that fulfils the need, with its box in pixels of the original image."""

    label: str
    box_xyxy: Box


@dataclass(frozen=True)
class Demand:
    """The objects that fulfil the need, each of them a right answer, and a thought that finds the first, if known."""

    fulfilling: tuple[Thing, ...]
    thought: str = ""


class DemandTask(TaskAdapter):
    """A task with one image and one spoken need, whose answer is a named box.

    The reward is IoU · (0.5 + 0.5 · name is right), for the fulfilling object that makes it greatest. A right name
    earns nothing without a box on the object, and a better box always earns more. Only the first box of an answer
    counts, so listing boxes does not help. A box of the whole image earns only the share that the object covers. A name
    is right if it equals the object's, apart from case, spaces and a leading article. Several names are wrong.

    `data` is a folder with {split}.jsonl, or "scenes": generated shapes, asked for by colour. `limit` is the maximum
    number of samples of a split. `question` is the prompt's text, which contains {need}. `seed` chooses the scenes.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "success"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None, seed: int = 0):
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        self.data, source = checked_source("demand", data, limit, question, "{need}", seed)
        self.limit, self.question, self.seed = limit, question, seed
        self.metric_note = (
            f"success: IoU >= {HIT_IOU} with an object that fulfils the need, and its name; acc@{HIT_IOU}: the box; "
            "continuous xyxy boxes in original pixels; the first box of an answer counts; "
            f"data: {source}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "scenes":
            return scene_samples(split, self.limit, self.seed, self._of_scene)
        keys = ("image", "need", "objects")
        return read_rows(self.data, split, self._of_row, "demand", self.limit, keys)

    def _of_row(self, row: dict[str, Any], folder: Path) -> Sample:
        fulfilling = []
        for thing in row["objects"]:
            x1, y1, x2, y2 = (float(side) for side in thing["bbox_xyxy"])
            if not (x1 < x2 and y1 < y2) or not str(thing["label"]).strip():
                raise ValueError(
                    f"the object {thing} has no name, or an empty box; bbox_xyxy is left, top, right, bottom"
                )
            if thing["fulfils"]:
                fulfilling.append(Thing(str(thing["label"]), (x1, y1, x2, y2)))
        if not fulfilling:
            raise ValueError("none of its objects fulfils the need")
        question = self.question.replace("{need}", row["need"])
        return Sample(row["id"], [folder / row["image"]], question, Demand(tuple(fulfilling)))

    def _of_scene(self, scene: Scene) -> Sample:
        row = scene_row(scene)
        things = [thing for thing in row["objects"] if thing["fulfils"]]
        target = Demand(tuple(Thing(t["label"], tuple(t["bbox_xyxy"])) for t in things), row["thought"])
        return Sample(scene.id, [scene.image], self.question.replace("{need}", row["need"]), target)

    def reward(self, sample: Sample, answer: str) -> Reward:
        found = parse_detections(answer)
        if not found:
            return Reward(0.0, dict.fromkeys(("iou", "label", "success", f"acc@{HIT_IOU}", "parsed"), 0.0))
        box, label = found[0].box_xyxy, _bare(found[0].label or _words_before(answer))
        scored = [
            (box_iou(box, thing.box_xyxy), float(label == _bare(thing.label))) for thing in sample.target.fulfilling
        ]
        iou, named = max(scored, key=lambda pair: (_value(*pair), pair[1]))
        hit = float(iou >= HIT_IOU)
        parts = {"iou": iou, "label": named, "success": hit * named, f"acc@{HIT_IOU}": hit, "parsed": 1.0}
        return Reward(_value(iou, named), parts)

    def reference_answer(self, sample: Sample) -> str:
        thing = sample.target.fulfilling[0]
        return json.dumps({"label": thing.label, "bbox_2d": [round(side, 3) for side in thing.box_xyxy]})

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought


def _value(iou: float, named: float) -> float:
    return iou * (1 - LABEL_SHARE + LABEL_SHARE * named)


def _bare(label: str) -> str:
    return re.sub(r"^(?:the|a|an)\s+", "", " ".join(label.casefold().split()).strip(" .,:;\"'`*"))


_WORDS = re.compile(r"([^\W\d][\w '-]{0,60}?)[\s:,\"'(\[{=]*[\[(]")


def _words_before(answer: str) -> str:
    """The name before a box in brackets, if it is written without a key: "red [1, 2, 3, 4]"."""
    start, end = answer_span(answer)
    match = _WORDS.match(answer[start:end].lstrip())
    return match[1] if match else ""
