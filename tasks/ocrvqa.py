"""OCR-VQA: questions about book covers: title, author, genre, edition."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tasks._vqa import QuestionAnswering
from vlm_grpo.scoring import exact_match


class OCRVQA(QuestionAnswering):
    """The reward is exact match apart from case and surrounding white space; metrics are also reported per genre."""

    headline: ClassVar[str] = "accuracy"
    note: ClassVar[str] = "accuracy: equal to a reference apart from case and surrounding white space"
    script: ClassVar[str] = "ocrvqa"

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        return {"accuracy": exact_match(answer, answers)}
