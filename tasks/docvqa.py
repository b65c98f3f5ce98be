"""DocVQA: questions about scanned pages, whose answer is a text on the page."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tasks._hub_rows import Asked, of_docvqa
from tasks._vqa import QuestionAnswering, result_json
from vlm_grpo.scoring import anls, exact_match, strict_anls
from vlm_grpo.task import Sample


class DocVQA(QuestionAnswering):
    """The metric is the official ANLS with the best of the references, also per question type.

    The reward is a strict ANLS, which padding an answer cannot raise; it is 0 below .5.
    """

    headline: ClassVar[str] = "anls"
    note: ClassVar[str] = "anls: the official script's; a similarity of exactly .5 counts"
    script: ClassVar[str] = "docvqa"
    repository: ClassVar[str | None] = "lmms-lab/DocVQA"
    repository_config: ClassVar[str | None] = "DocVQA"
    id_column: ClassVar[str | None] = "questionId"

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        return of_docvqa(row)

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        return {"anls": anls(answer, answers), "exact_match": exact_match(answer, answers)}

    def value(self, answers: Sequence[str], answer: str, parts: Mapping[str, float]) -> float:
        return strict_anls(answer, answers)

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """The challenge's result file: a JSON array of {"questionId", "answer"}."""
        return {"docvqa_results.json": result_json(samples, answers, "questionId", "answer")}
