"""VQAv2: open questions about photographs, each answered by ten people. Or questions about generated scenes."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tasks._vqa import SoftAccuracy, scenes
from vlm_grpo.errors import UserError
from vlm_grpo.task import Sample

SCENES = {"train": 4096, "sft": 16384, "val": 256, "test": 512}  # split: samples where no limit is given


class VQAv2(SoftAccuracy):
    """Soft accuracy over the ten people's answers; metrics also per answer type and question type.

    `data` may be "scenes": what colour the left, large, … shape has; `seed` chooses the scenes.
    """

    script: ClassVar[str] = "vqav2"
    repository: ClassVar[str | None] = "lmms-lab/VQAv2"
    id_column: ClassVar[str | None] = "question_id"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None, seed: int = 0):
        super().__init__(data, limit, question or ("{question}" if data == "scenes" else None))
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UserError(f"task_args.seed is {seed!r}; accepted: a whole number from 0")
        self.seed = seed

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data != "scenes":
            return super().samples(split)
        from data_scripts.scene_questions import colour_question

        return scenes(split, self.limit, self.seed, SCENES, colour_question)

    def of_hub(self) -> Callable[..., Any]:
        from data_scripts.vqav2 import of_hub

        return of_hub
