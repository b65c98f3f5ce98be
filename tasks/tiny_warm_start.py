"""The warm-start data of the shipped tiny model: questions about generated scenes, on a split that no other run uses.

The task is meant for `vlm_grpo.sft`; its reward only serves to evaluate progress.
"""

from collections.abc import Sequence
from typing import ClassVar

from tasks._generated.warm_start import WARM_START_STAGES, warm_start_example
from vlm_grpo.scoring import box_iou, exact_match, parse_box
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError


class TinyWarmStart(TaskAdapter):
    """Scenes with questions of several kinds; `warm_start_example` explains `stage` and `looseness`."""

    coordinates: ClassVar[bool] = True

    def __init__(self, stage: str = "dense", looseness: float = 0.0, count: int = 200_000, seed: int = 0):
        if stage not in WARM_START_STAGES:
            raise UserError(f"task_args.stage is {stage!r}; accepted: {', '.join(WARM_START_STAGES)}")
        self.stage, self.looseness, self.count, self.seed = stage, looseness, count, seed

    def samples(self, split: str) -> Sequence[Sample]:
        if split not in ("train", "val"):
            raise UserError(f"the warm start has no split {split!r}; it has: train, val")
        first = 0 if split == "train" else self.count
        ids = [f"{self.stage}-{split}-{index}" for index in range(self.count if split == "train" else 256)]

        def make(index: int) -> Sample:
            image, question, thought, answer = warm_start_example(self.stage, first + index, self.seed, self.looseness)
            return Sample(ids[index], [image], question, (thought, answer))

        return LazySamples(ids, make)

    def reward(self, sample: Sample, answer: str) -> Reward:
        target = parse_box(sample.target[1])
        if target is None:
            return Reward(float(exact_match(answer, [sample.target[1]])))
        box = parse_box(answer)
        return Reward(0.0 if box is None else box_iou(box, target))

    def reference_answer(self, sample: Sample) -> str:
        return sample.target[1]

    def reference_thought(self, sample: Sample) -> str:
        return sample.target[0]
