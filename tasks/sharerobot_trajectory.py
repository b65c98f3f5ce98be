"""ShareRobot trajectory: the path of a robot's end effector for an instruction (arXiv 2502.21257).

GRPO-MA (arXiv 2509.24494) trains on this data, from ShareRobot's own files or from its manifests.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tasks._generated.scenes import describe, make_path_scene, target_shape
from tasks._rows import read_rows
from tasks._scenes import checked_source, numbered_samples
from vlm_grpo.scoring.parsing import Point, parse_trajectory
from vlm_grpo.scoring.shapes import frechet_distance, hausdorff_distance, path_rmse, path_rmse_by_index
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError

QUESTION = (
    "You are a robot. The task is: {instruction}. Give the path of your end effector that completes it, as a list of "
    "points [[x1, y1], [x2, y2], ...] in the order in which they are passed, at least three."
)
SCENE_QUESTION = "Locate {instruction}"
FEWEST_POINTS = 3  # of a reference
WORST_DISTANCE = math.sqrt(2)  # the diagonal of the unit square: the distances of an answer without a path
CORRECT_DISTANCE = 0.1
NUMBERS = {3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Path2D:
    """The reference path in pixels of the original image; `size` is the image's (width, height)."""

    points: tuple[Point, ...]
    size: tuple[int, int]
    thought: str = ""


class ShareRobotTrajectory(TaskAdapter):
    """A task with one image and one instruction, whose answer is a path; the reward is max(0, 1 − DFD / `zero_at`).

    DFD is the discrete Fréchet distance to the reference, where x is divided by the image's width and y by its height.
    The reward falls linearly to 0 at a distance of `zero_at`. A wrong point costs as much as its distance from the
    path, so extra or repeated points cannot raise the reward.

    `data` is a folder with {split}.jsonl, or "scenes": a straight path between two generated shapes. `limit` is the
    maximum number of samples of a split. `question` is the prompt's text, which contains {instruction}, for rows
    without a question of their own. `seed` chooses the scenes.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "dfd"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(
        self,
        data: str | None = None,
        limit: int | None = None,
        question: str | None = None,
        zero_at: float = 0.5,
        seed: int = 0,
    ):
        if isinstance(zero_at, bool) or not isinstance(zero_at, int | float) or not 0 < zero_at <= 2:
            raise UserError(f"task_args.zero_at is {zero_at!r}; accepted: a number above 0, at most 2")
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        self.data, source = checked_source("sharerobot_trajectory", data, limit, question, "{instruction}", seed)
        self.limit, self.question, self.zero_at, self.seed = limit, question, float(zero_at), seed
        self.metric_note = (
            "dfd: discrete Fréchet distance, hd: Hausdorff distance, rmse: of 50 points in equal steps on each path, "
            "rmse_index: ShareRobot's own, of the points as they are numbered, as many as the shorter path has; x "
            "divided by the image's width and y by its height; lower is better; an answer without a path counts "
            f"{WORST_DISTANCE:.4f} in each (in FlagEvalMM the point (0, 0)); data: {source}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "scenes":
            return _scenes(split, self.limit, self.seed, self.question)
        keys = ("image", "points", "width", "height")
        return read_rows(self.data, split, self._make, "sharerobot_trajectory", self.limit, keys)

    def _make(self, row: dict[str, Any], folder: Path) -> Sample:
        points = tuple((float(x), float(y)) for x, y in row["points"])
        width, height = int(row["width"]), int(row["height"])
        if len(points) < FEWEST_POINTS or min(width, height) < 1:
            raise ValueError(f"{len(points)} points in {width}×{height}; there must be {FEWEST_POINTS} points or more")
        question = row["question"] if "question" in row else self.question.replace("{instruction}", row["instruction"])
        return Sample(row["id"], [folder / row["image"]], question, Path2D(points, (width, height)))

    def reward(self, sample: Sample, answer: str) -> Reward:
        points = _scaled(parse_trajectory(answer), sample.target.size)
        reference = _scaled(sample.target.points, sample.target.size)
        # A coordinate far outside the image is no worse than one a few images away
        near = [(min(max(x, -10.0), 10.0), min(max(y, -10.0), 10.0)) for x, y in points]
        distances = {
            "dfd": frechet_distance,
            "hd": hausdorff_distance,
            "rmse": path_rmse,
            "rmse_index": path_rmse_by_index,
        }
        parts = {name: distance(near, reference) if near else WORST_DISTANCE for name, distance in distances.items()}
        return Reward(max(0.0, 1 - parts["dfd"] / self.zero_at), parts | {"parsed": float(bool(near))})

    def reference_answer(self, sample: Sample) -> str:
        return json.dumps([[round(x, 4), round(y, 4)] for x, y in sample.target.points])

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def is_correct(self, reward: Reward) -> bool:
        """Whether the path stays within a tenth of the image's sides of the reference."""
        return reward.parts["dfd"] <= CORRECT_DISTANCE


def _scaled(points: Sequence[Point], size: tuple[int, int]) -> list[Point]:
    return [(x / size[0], y / size[1]) for x, y in points]


def _scenes(split: str, limit: int | None, seed: int, question: str) -> LazySamples:
    """Samples with straight paths from the middle of one shape to that of another, with three to five points."""

    def make(id_: str, index: int) -> Sample:
        scene, end, end_expression = make_path_scene(split, index, seed)
        start, size = target_shape(scene), scene.image.size
        (x1, y1), (x2, y2) = start.centre, end.centre
        length = math.hypot((x2 - x1) / size[0], (y2 - y1) / size[1])
        count = 3 if length < 0.4 else 4 if length < 0.55 else 5
        shares = [step / (count - 1) for step in range(count)]
        points = tuple((float(round(x1 + (x2 - x1) * s)), float(round(y1 + (y2 - y1) * s))) for s in shares)
        asked = question.replace("{instruction}", f"{NUMBERS[count]} from {scene.expression} to {end_expression}")
        thought = f"{describe(start, size)} to {describe(end, size)}"
        return Sample(id_, [scene.image], asked, Path2D(points, size, thought))

    return numbered_samples(split, limit, seed, make)
