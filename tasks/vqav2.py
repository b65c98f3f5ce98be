"""VQAv2: open questions about photographs, each answered by ten people; or questions about generated scenes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tasks._generated.questions import make_question_scene
from tasks._hub_rows import Asked, of_vqa
from tasks._rows import HUB_SPLITS
from tasks._scenes import check_seed, numbered_samples
from tasks._vqa import Reference, SoftAccuracy
from vlm_grpo.task import Sample


class VQAv2(SoftAccuracy):
    """The soft accuracy over the ten people's answers; metrics are also reported per answer type and question type.

    `data` may be "scenes": questions for the colour of the left, large, … shape. `seed` chooses the scenes.
    """

    script: ClassVar[str] = "vqav2"
    repository: ClassVar[str | None] = "lmms-lab/VQAv2"
    hub_splits: ClassVar[Mapping[str, str]] = {**HUB_SPLITS, "test-dev": "testdev"}
    id_column: ClassVar[str | None] = "question_id"
    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None, seed: int = 0):
        super().__init__(data, limit, question or ("{question}" if data == "scenes" else None))
        check_seed(seed, data)
        self.seed = seed

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data != "scenes":
            return super().samples(split)

        def make(id_: str, index: int) -> Sample:
            scene, question, answer, thought = make_question_scene(split, index, self.seed)
            return self._sample(id_, [scene.image], question, Reference((answer,), id_, (), thought))

        return numbered_samples(split, self.limit, self.seed, make)

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        return of_vqa(row, row)
