"""The base of tasks whose answer is one box: published evaluation protocols, reward, reference answer and metrics."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vlm_grpo.scoring import Box, box_iou, parse_box
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter


@dataclass(frozen=True)
class Referent:
    """The target: the box in pixels of the original image, and a thought that finds it, if there is one."""

    box_xyxy: Box
    thought: str = ""


@dataclass(frozen=True)
class Protocol:
    """A published way to evaluate boxes."""

    iou: Callable[[Sequence[float], Sequence[float]], float]
    is_hit: Callable[[float], bool]
    note: str
    grow: float = 0.0
    """Pixels added to x2 and y2 of every reference box."""
    subset: int | None = None
    """Number of evaluation samples, drawn by Python's random.shuffle with seed 42; None for all."""
    more_metrics: bool = False
    """Whether to add accuracies at other thresholds and of the centre."""


def iou_of_wide_overlaps(first: Sequence[float], second: Sequence[float]) -> float:
    """IoU as VLM-R1 computes it: 0 if the overlap is at most one pixel wide or high."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return box_iou(first, second) if min(width, height) > 1 else 0.0


BOXES = "continuous xyxy boxes in original pixels; an answer without a box counts as a miss"
PROTOCOLS = {
    "standard": Protocol(box_iou, lambda iou: iou >= 0.5, f"hit: IoU >= 0.5; {BOXES}"),
    "vlm-r1": Protocol(
        iou_of_wide_overlaps,
        lambda iou: iou > 0.5,
        f"hit: IoU > 0.5; {BOXES}; reference boxes one pixel wider and higher; overlaps of one pixel or less count 0; "
        "evaluated on the first 2000 samples after a shuffle with seed 42",
        grow=1.0,
        subset=2000,
    ),
    "lmms-eval": Protocol(
        box_iou,
        lambda iou: iou >= 0.5,
        f"hit: IoU >= 0.5, and accuracies at .1 .3 .7 .9 and of the centre; {BOXES}",
        more_metrics=True,
    ),
}
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


class BoxTask(TaskAdapter):
    """A task with one image and one box, evaluated by `protocol`. The reward is the IoU; targets have a `box_xyxy`."""

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "acc@0.5"
    protocol: Protocol

    def protocol_samples(self, read: Callable[[int | None], LazySamples], split: str, limit: int | None) -> LazySamples:
        """The samples of a split that the protocol evaluates, at most `limit`. Of a training split, all are kept.

        `read(limit)` returns the first samples of the split, or all for None.
        """
        if self.protocol.subset is None or split == "train":
            return read(limit)
        every = read(None)
        chosen = list(range(len(every)))
        random.Random(42).shuffle(chosen)
        return every.take(chosen[: self.protocol.subset][:limit])

    def reward(self, sample: Sample, answer: str) -> Reward:
        box = parse_box(answer)
        iou = 0.0 if box is None else self.protocol.iou(box, sample.target.box_xyxy)
        parts = {"iou": iou, "acc@0.5": float(self.protocol.is_hit(iou)), "parsed": float(box is not None)}
        return Reward(iou, parts)

    def reference_answer(self, sample: Sample) -> str:
        return json.dumps([round(side, 4) for side in sample.target.box_xyxy])

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        """Acc@0.5, mean IoU and the share of answers with a box, by the protocol; all are means over the samples."""
        ious = [reward.parts["iou"] for reward in rewards]
        metrics = {
            "acc@0.5": mean([reward.parts["acc@0.5"] for reward in rewards]),
            "mean_iou": mean(ious),
            "parsed": mean([reward.parts["parsed"] for reward in rewards]),
        }
        if self.protocol.more_metrics:
            metrics |= {f"acc@{threshold}": mean([float(iou >= threshold) for iou in ious]) for threshold in THRESHOLDS}
            centred = [
                float(_centre_lies_within(parse_box(answer), sample.target.box_xyxy))
                for sample, answer in zip(samples, answers, strict=True)
            ]
            metrics["centre_acc"] = mean(centred)
        return metrics


def read_box(sides: Sequence[Any]) -> Box:
    """The box of a row. Raises ValueError if `sides` is no box, or an empty one."""
    x1, y1, x2, y2 = (float(side) for side in sides)
    if not (-math.inf < x1 < x2 < math.inf and -math.inf < y1 < y2 < math.inf):
        raise ValueError(f"the box {[x1, y1, x2, y2]} is empty; bbox_xyxy is left, top, right, bottom")
    return (x1, y1, x2, y2)


def mean(values: Sequence[float]) -> float:
    """The mean of `values`, which are not empty."""
    return math.fsum(values) / len(values)


def _centre_lies_within(box: Box | None, target: Box) -> bool:
    if box is None:
        return False
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return target[0] <= x <= target[2] and target[1] <= y <= target[3]
