"""GQA: compositional questions about photographs, with one short answer each."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tasks._vqa import QuestionAnswering, result_json
from vlm_grpo.scoring import exact_match
from vlm_grpo.task import Sample


class GQA(QuestionAnswering):
    """The reward is exact match apart from case and surrounding white space.

    Metrics are also reported per structural and semantic type.
    """

    headline: ClassVar[str] = "accuracy"
    note: ClassVar[str] = "accuracy: equal to the reference apart from case and surrounding white space"
    script: ClassVar[str] = "gqa"

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        return {"accuracy": exact_match(answer, answers)}

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """The official script's input: a JSON array of {"questionId", "prediction"}. The script is case-sensitive."""
        lower = [answer.lower() for answer in answers]
        return {"gqa_predictions.json": result_json(samples, lower, "questionId", "prediction")}
