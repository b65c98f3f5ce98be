"""COCO detection: all boxes of the categories that a question names. The metric is pycocotools' mAP."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tasks._rows import check_limit, read_rows
from vlm_grpo.scoring import Box
from vlm_grpo.scoring.parsing import Detection, parse_detections
from vlm_grpo.scoring.shapes import covered_shares, detection_score, match_boxes
from vlm_grpo.task import Reward, Sample, TaskAdapter, UserError

QUESTION = (
    "Detect every object of these categories: {categories}. Answer with a JSON list that has one entry "
    '{"bbox_2d": [x1, y1, x2, y2], "label": category} for each object.'
)
IOU_THRESHOLD = 0.5
SUMMARY = ("mAP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")  # COCOeval.stats[:6]


@dataclass(frozen=True)
class Thing:
    """One annotated object: its box in pixels of the original image, and the `area` of its outline."""

    box_xyxy: Box
    label: str
    category_id: int
    area: float
    is_crowd: bool


@dataclass(frozen=True)
class Things:
    """All objects of an image, and COCO's id of the image."""

    image_id: int
    things: tuple[Thing, ...]

    @property
    def single(self) -> list[Thing]:
        """The objects that are not crowd regions."""
        return [thing for thing in self.things if not thing.is_crowd]

    def named(self, label: str) -> str:
        """The label as COCO writes it; unchanged if the image has no such category."""
        plain = label.strip().casefold()
        return next((thing.label for thing in self.things if thing.label.casefold() == plain), label)


class CocoDetection(TaskAdapter):
    """A task with one image and the names of its categories, whose answer is a set of labelled boxes.

    Boxes are matched to objects of the same label at an IoU of 0.5 or more. The reward is F1 × mean IoU of the best
    matching, which equals 2 Σ IoU / (boxes + objects). Every box without a match lowers it, so repeated or huge boxes
    do not help. As in COCO's evaluation, crowd regions are no objects, and a box without a match does not count if at
    least half of its area lies in a crowd region of its label.

    `data` is a folder with {split}.jsonl. `limit` is the maximum number of samples of a split. `question` is the
    prompt's text, which contains {categories}.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "mAP"

    def __init__(self, data: str | None = None, limit: int | None = None, question: str = QUESTION):
        if data is None:
            raise UserError(
                "task coco_detection has no data. Give task_args.data: a folder made by "
                "`python -m data_scripts.coco_detection` from instances_train2017.json or instances_val2017.json."
            )
        check_limit(limit)
        if "{categories}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{categories}}")
        self.data, self.limit, self.question = data, limit, question
        self.metric_note = (
            "mAP: pycocotools' bbox AP at IoU .50:.95, all boxes with a score of 1 in the answer's order; questions "
            "name the categories of their image, so that numbers are not those of detectors that are not told; data: "
            f"{data}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        return read_rows(self.data, split, self._make, "coco_detection", self.limit, ("image", "image_id", "objects"))

    def _make(self, row: dict[str, Any], folder: Path) -> Sample:
        things = Things(int(row["image_id"]), tuple(_thing(entry) for entry in row["objects"]))
        if not things.single:
            raise ValueError("the image has no object that is no crowd")
        categories = ", ".join(dict.fromkeys(thing.label for thing in things.single))
        return Sample(row["id"], [folder / row["image"]], self.question.replace("{categories}", categories), things)

    def reward(self, sample: Sample, answer: str) -> Reward:
        target: Things = sample.target
        found = _named(target, answer)
        boxes, labels = [one.box_xyxy for one in found], [one.label for one in found]
        single = target.single
        pairs = match_boxes(
            boxes, labels, [t.box_xyxy for t in single], [t.label for t in single], threshold=IOU_THRESHOLD
        )
        counted = len(found) - len(_in_crowds(target, found, {i for i, _, _ in pairs}))
        ious = [iou for _, _, iou in pairs]
        value = detection_score(ious, counted, len(single))
        parts = {
            "precision": len(pairs) / counted if counted else 0.0,
            "recall": len(pairs) / len(single),
            "f1": 2 * len(pairs) / (counted + len(single)),
            "matched_iou": sum(ious) / len(ious) if ious else 0.0,
            "parsed": float(bool(found)),
        }
        return Reward(value, parts)

    def reference_answer(self, sample: Sample) -> str:
        entries = [
            {"bbox_2d": [round(side, 3) for side in thing.box_xyxy], "label": thing.label}
            for thing in sample.target.single
        ]
        return json.dumps(entries, ensure_ascii=False)

    def is_correct(self, reward: Reward) -> bool:
        """Whether every object is matched and no box is left over."""
        return reward.parts["f1"] == 1

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        """Means of reward and parts, COCO's AP, AP50 and AP75, and the AP of each size that has objects."""
        found = [parse_detections(answer) for answer in answers]
        precision = average_precision([sample.target for sample in samples], found)
        return super().metrics(samples, answers, rewards) | precision

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """The file detections.json in COCO's result format, for COCO.loadRes and the evaluation server."""
        targets = [sample.target for sample in samples]
        found = [parse_detections(answer) for answer in answers]
        return {"detections.json": json.dumps(_results(targets, found, [one.image_id for one in targets])).encode()}


def average_precision(references: Sequence[Things], found: Sequence[Sequence[Detection]]) -> dict[str, float]:
    """COCO's AP of detections, given as one list per image. An image that is given twice counts as two images."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations = [
        {"image_id": at, "category_id": thing.category_id, "bbox": _xywh(thing.box_xyxy), "area": thing.area}
        | {"iscrowd": int(thing.is_crowd)}
        for at, reference in enumerate(references)
        for thing in reference.things
    ]
    results = _results(references, found, range(len(references)))
    if not results:
        return dict.fromkeys(SUMMARY[:3], 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth: Any = COCO()  # its types know files only
        truth.dataset = {
            "images": [{"id": at} for at in range(len(references))],
            "categories": [{"id": one} for one in sorted({entry["category_id"] for entry in annotations})],
            "annotations": [entry | {"id": number} for number, entry in enumerate(annotations, start=1)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # -1 stands for no object of that size
    return {name: float(value) for name, value in zip(SUMMARY, evaluation.stats[:6], strict=True) if value >= 0}


def _thing(entry: dict[str, Any]) -> Thing:
    x1, y1, x2, y2 = (float(side) for side in entry["bbox_xyxy"])
    label, category_id = str(entry["label"]), int(entry["category_id"])
    return Thing((x1, y1, x2, y2), label, category_id, float(entry["area"]), bool(entry.get("iscrowd", 0)))


def _named(target: Things, answer: str) -> list[Detection]:
    """The answer's detections, with labels as COCO writes them."""
    return [Detection(one.box_xyxy, target.named(one.label)) for one in parse_detections(answer)]


def _in_crowds(target: Things, found: Sequence[Detection], matched: set[int]) -> list[int]:
    """Indices of the unmatched detections that lie in a crowd region of their label."""
    crowds = [thing for thing in target.things if thing.is_crowd]
    if not crowds or not found:
        return []
    shares = covered_shares([one.box_xyxy for one in found], [crowd.box_xyxy for crowd in crowds])
    return [
        at
        for at, one in enumerate(found)
        if at not in matched
        and any(
            crowd.label == one.label and share >= IOU_THRESHOLD for crowd, share in zip(crowds, shares[at], strict=True)
        )
    ]


def _results(
    targets: Sequence[Things], found: Sequence[Sequence[Detection]], image_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Detections in COCO's result format. Detections whose label is no category of the images are left out."""
    numbers = {thing.label.casefold(): thing.category_id for target in targets for thing in target.things}
    return [
        {"image_id": image_id, "category_id": number, "bbox": _xywh(one.box_xyxy), "score": 1.0}
        for image_id, detections in zip(image_ids, found, strict=True)
        for one in detections
        if (number := numbers.get(one.label.strip().casefold())) is not None
    ]


def _xywh(box: Box) -> list[float]:
    x1, y1, x2, y2 = box
    return [x1, y1, max(x2 - x1, 0.0), max(y2 - y1, 0.0)]
