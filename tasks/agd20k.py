"""AGD20K: points on the part of an object where an action takes place, compared with a heat map (arXiv 2203.09905)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tasks._rows import check_limit, read_rows
from vlm_grpo.common.images import open_image
from vlm_grpo.scoring.parsing import Point, parse_points
from vlm_grpo.scoring.shapes import heat_map, kl_divergence, resized_map, scanpath_saliency, similarity
from vlm_grpo.task import Reward, Sample, TaskAdapter, UserError

QUESTION = (
    "A person wants to {action} the {object}. Which places of it take part? Answer with up to ten points on them, as a "
    "list [[x1, y1], [x2, y2], ...]."
)
GRID = (224, 224)  # rows and columns on which maps are compared, as published evaluations do
SIGMA = 0.06  # of the Gaussian around a point, as a share of the grid's side
MOST_POINTS = 10  # of an answer that count: a map is not to be filled by listing points everywhere


@dataclass(frozen=True, eq=False)
class HeatMap:
    """The annotated heat map of an image of `size` (width, height), read on first use."""

    path: Path
    size: tuple[int, int]
    sigma: float

    @cached_property
    def values(self) -> np.ndarray:
        """The annotated map on the grid, from 0 to 1."""
        values = np.array(open_image(self.path, f"the heat map {self.path}", "L"), dtype=np.float64) / 255
        if not values.any():
            raise UserError(f"the heat map {self.path} is 0 everywhere")
        return resized_map(values, GRID)

    def draw(self, points: Sequence[Point]) -> np.ndarray:
        """The map of an answer on the grid: Gaussians around its points (original pixels), scaled to 0 … 1."""
        scaled = [(x * GRID[1] / self.size[0], y * GRID[0] / self.size[1]) for x, y in points[:MOST_POINTS]]
        drawn = heat_map(scaled, GRID, self.sigma * GRID[0])
        spread = drawn.max() - drawn.min()
        return (drawn - drawn.min()) / spread if spread > 0 else np.zeros(GRID)

    @cached_property
    def reference(self) -> tuple[list[Point], float]:
        """Points, in original pixels, whose map is similar to the annotated one, and the SIM of the two maps.

        The search is greedy: each new point is where the annotation exceeds the current map most. Of all numbers of
        points, the one with the greatest SIM is kept.
        """
        found: list[Point] = []
        best: tuple[list[Point], float] = ([], -1.0)
        goal = self.values / self.values.max()
        for _ in range(MOST_POINTS):
            y, x = np.unravel_index(int(np.argmax(goal - self.draw(found))), GRID)
            width, height = self.size
            point = float(x + 0.5) * width / GRID[1], float(y + 0.5) * height / GRID[0]
            found = [*found, (round(point[0], 1), round(point[1], 1))]
            like = similarity(self.draw(found), self.values)
            best = max(best, (found, like), key=lambda pair: pair[1])
        return best


class AGD20K(TaskAdapter):
    """A task with one image, an action and an object, whose answer is points.

    The reward is the answer's SIM divided by that of the reference answer, at most 1. The first ten points of an answer
    become a heat map: the maximum of Gaussians with a standard deviation of `sigma` times the side, scaled to 0 … 1, on
    a grid of 224 × 224, to which the annotated map is resized. SIM is the intersection of the two maps, each divided by
    its sum. A few Gaussians never reach a SIM of 1, hence the division; the points of the reference answer are found
    greedily. Points beyond the tenth are ignored.

    `data` is a folder with {split}.jsonl. `limit` is the maximum number of samples of a split. `question` is the
    prompt's text, which contains {action} and {object}.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "sim"

    def __init__(
        self, data: str | None = None, limit: int | None = None, question: str = QUESTION, sigma: float = SIGMA
    ):
        if data is None:
            raise UserError(
                "task agd20k has no data. Give task_args.data: a folder made by `python -m data_scripts.agd20k`."
            )
        check_limit(limit)
        if "{action}" not in question or "{object}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{action}} and {{object}}")
        if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0.005 <= sigma <= 1:
            raise UserError(f"task_args.sigma is {sigma!r}; accepted: a number from 0.005 to 1")
        self.data, self.limit, self.question, self.sigma = data, limit, question, float(sigma)
        self.metric_note = (
            f"KLD (lower is better), SIM, NSS of 224 × 224 maps; an answer's map: Gaussians of sigma {sigma:g} of the "
            f"side around its first {MOST_POINTS} points; an answer without points is a map of zeros; data: {data}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        def make(row: dict[str, Any], folder: Path) -> Sample:
            size = (int(row["width"]), int(row["height"]))
            question = self.question.replace("{action}", row["action"]).replace("{object}", row["object"])
            target = HeatMap(folder / row["heat_map"], size, self.sigma)
            return Sample(row["id"], [folder / row["image"]], question, target)

        keys = ("image", "heat_map", "action", "object", "width", "height")
        return read_rows(self.data, split, make, "agd20k", self.limit, keys)

    def reward(self, sample: Sample, answer: str) -> Reward:
        target: HeatMap = sample.target
        points = parse_points(answer)
        drawn = target.draw(points)
        like = similarity(drawn, target.values)
        parts = {
            "sim": like,
            "kld": kl_divergence(drawn, target.values),
            "nss": scanpath_saliency(drawn, target.values),
            "parsed": float(bool(points)),
        }
        return Reward(min(1.0, like / target.reference[1]), parts)

    def reference_answer(self, sample: Sample) -> str:
        return str([[x, y] for x, y in sample.target.reference[0]])

    def is_correct(self, reward: Reward) -> bool:
        """Whether the answer's SIM is at least that of the reference answer."""
        return reward.value >= 1 - 1e-6
