"""ShareRobot affordance: the box of the part that a robot should grasp for an instruction (arXiv 2502.21257)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tasks._boxes import Referent, mean, read_box
from tasks._generated.scenes import Scene, middle_of
from tasks._rows import read_rows
from tasks._scenes import checked_source, scene_samples
from vlm_grpo.scoring import box_iou, parse_box
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter

QUESTION = (
    "You are a robot. The task is: {instruction}. Give the bounding box [x1, y1, x2, y2] of the area of the object "
    "where it can be taken hold of or acted on."
)
SCENE_QUESTION = "Locate: {instruction}"
THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))  # COCO's


class ShareRobotAffordance(TaskAdapter):
    """A task with one image and one instruction, whose answer is a box; the reward is the IoU.

    `data` is a folder with {split}.jsonl, or "scenes": generated shapes, where the answer is the middle of one shape,
    half as wide and half as high. `limit` is the maximum number of samples of a split. `question` is the prompt's text,
    which contains {instruction}. `seed` chooses the scenes.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "iou"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None, seed: int = 0):
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        self.data, source = checked_source("sharerobot_affordance", data, limit, question, "{instruction}", seed)
        self.limit, self.question, self.seed = limit, question, seed
        self.metric_note = (
            "IoU of continuous xyxy boxes in original pixels, 0 without a box; the mean IoU is what ShareRobot's own "
            "evaluation (FlagEvalMM) calls average precision; ap: COCO's, the mean over IoU thresholds .50 to .95 of "
            f"the share of images whose box reaches it, each having one box of full confidence; data: {source}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "scenes":
            return _scenes(split, self.limit, self.seed, self.question)

        def make(row: dict[str, Any], folder: Path) -> Sample:
            question = self.question.replace("{instruction}", row["instruction"])
            return Sample(row["id"], [folder / row["image"]], question, Referent(read_box(row["bbox_xyxy"])))

        keys = ("image", "instruction", "bbox_xyxy")
        return read_rows(self.data, split, make, "sharerobot_affordance", self.limit, keys)

    def reward(self, sample: Sample, answer: str) -> Reward:
        """The IoU of the first box of the answer with the reference; part `ap` is one image's share of the AP."""
        box = parse_box(answer)
        iou = 0.0 if box is None else box_iou(box, sample.target.box_xyxy)
        parts = {"iou": iou, "ap": mean([float(iou >= threshold) for threshold in THRESHOLDS])}
        return Reward(iou, parts | {"ap50": float(iou >= 0.5), "parsed": float(box is not None)})

    def reference_answer(self, sample: Sample) -> str:
        return json.dumps([round(side, 4) for side in sample.target.box_xyxy])

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def is_correct(self, reward: Reward) -> bool:
        return reward.parts["ap50"] == 1


def _scenes(split: str, limit: int | None, seed: int, question: str) -> LazySamples:
    def make(scene: Scene) -> Sample:
        asked = question.replace("{instruction}", f"the middle of {scene.expression}")
        return Sample(scene.id, [scene.image], asked, Referent(middle_of(scene.box_xyxy), scene.thought))

    return scene_samples(split, limit, seed, make)
