"""Pointing at the place where a robot should act: Where2Place, RefSpatial-Bench, RoboAfford-Eval."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tasks._generated.scenes import Scene, mask_of, target_shape
from tasks._rows import read_rows
from tasks._scenes import checked_source, scene_samples
from vlm_grpo.common.images import open_image
from vlm_grpo.scoring.parsing import parse_points
from vlm_grpo.scoring.shapes import deepest_point, points_in_mask
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError

QUESTION = "{question} Answer with a list of points [[x1, y1], [x2, y2], ...]; one is enough."
SCENE_QUESTION = "Locate one inside {question}"


@dataclass(frozen=True, eq=False)
class Region:
    """The region in which points are right: a mask as an array, or the path of its image, which is read on first use.

    `group` is the sample's part of the benchmark, if any; its metrics are also reported separately. `size` is the
    image's width and height, if known; the mask must have the same size.
    """

    source: Path | np.ndarray
    group: str = ""
    thought: str = ""
    size: tuple[int, int] | None = None

    @cached_property
    def mask(self) -> np.ndarray:
        """The mask as (height, width); true inside the region."""
        if isinstance(self.source, np.ndarray):
            return self.source
        mask = np.array(open_image(self.source, f"the mask {self.source}", "L")) > 127
        if self.size is not None and mask.shape != self.size[::-1]:
            raise UserError(f"the mask {self.source} is of {mask.shape[::-1]} pixels, its image of {self.size}")
        if not mask.any():
            raise UserError(f"the mask {self.source} is empty: no point would be right")
        return mask


class PointAffordance(TaskAdapter):
    """A task with one image and one question, whose answer is points; the reward is the share of them in the mask.

    Because it is a share, many points, or one point many times, earn no more than the best of them alone. Points are in
    pixels of the original image, although the benchmarks' own answers are from 0 to 1: the trainer converts the model's
    coordinates, and the benchmarks' instructions about the format are removed from the questions.

    `data` is a folder with {split}.jsonl, or "scenes": a point on a generated shape, where a ring has a hole. `limit`
    is the maximum number of samples of a split. `question` is the prompt's text, which contains {question}. `seed`
    chooses the scenes.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "in_mask"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None, seed: int = 0):
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        self.data, source = checked_source("point_affordance", data, limit, question, "{question}", seed)
        self.limit, self.question, self.seed = limit, question, seed
        self.metric_note = (
            "in_mask: mean over samples of the share of predicted points in the mask; points outside the image count "
            f"0, an answer without points 0; a mask is true where it is above half white; data: {source}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "scenes":
            return _scenes(split, self.limit, self.seed, self.question)

        def make(row: dict[str, Any], folder: Path) -> Sample:
            size = (int(row["width"]), int(row["height"])) if "width" in row else None
            region = Region(folder / row["mask"], str(row.get("group", "")), size=size)
            question = self.question.replace("{question}", row["question"])
            return Sample(row["id"], [folder / row["image"]], question, region)

        return read_rows(self.data, split, make, "point_affordance", self.limit, ("image", "mask", "question"))

    def reward(self, sample: Sample, answer: str) -> Reward:
        points = parse_points(answer)
        share = points_in_mask(points, sample.target.mask)
        return Reward(share, {"in_mask": share, "points": float(len(points)), "parsed": float(bool(points))})

    def reference_answer(self, sample: Sample) -> str:
        """The point deepest inside the mask."""
        x, y = deepest_point(sample.target.mask)
        return f"[[{x:g}, {y:g}]]"

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def groups(self, sample: Sample) -> Sequence[str]:
        """The sample's number of steps in RefSpatial-Bench, or its category in RoboAfford-Eval."""
        return [sample.target.group] if sample.target.group else []


def _scenes(split: str, limit: int | None, seed: int, question: str) -> LazySamples:
    def make(scene: Scene) -> Sample:
        region = Region(mask_of(target_shape(scene), scene.image.size), thought=scene.thought)
        return Sample(scene.id, [scene.image], question.replace("{question}", scene.expression), region)

    return scene_samples(split, limit, seed, make)
