"""ChartQA: questions about charts, whose answer is a number or a text."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tasks._hub_rows import CHART_KINDS, Asked, of_chartqa
from tasks._vqa import QuestionAnswering
from vlm_grpo.scoring import relaxed_accuracy
from vlm_grpo.task import Reward, Sample


class ChartQA(QuestionAnswering):
    """Reward and metric are the relaxed accuracy: 1 for a number within 5% or a text equal apart from case, else 0.

    Metrics are also reported for the human and the augmented questions, and as the average of the two.
    """

    headline: ClassVar[str] = "relaxed_accuracy"
    note: ClassVar[str] = "relaxed_accuracy: numbers within 5% of the reference, other answers equal apart from case"
    script: ClassVar[str] = "chartqa"
    repository: ClassVar[str | None] = "lmms-lab/ChartQA"

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        return of_chartqa(split, number, row)

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        return {"relaxed_accuracy": max(relaxed_accuracy(answer, reference) for reference in answers)}

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        metrics = super().metrics(samples, answers, rewards)
        halves = [metrics[name] for kind in CHART_KINDS if (name := f"{self.headline}/{kind}") in metrics]
        return metrics | ({f"{self.headline}/average": sum(halves) / 2} if len(halves) == 2 else {})
