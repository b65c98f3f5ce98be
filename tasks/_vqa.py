"""Base classes for visual question answering: one question, one image, one or more reference answers."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from tasks._hub_rows import Asked
from tasks._rows import HUB_SPLITS, check_limit, load_hub, read_hub_rows, read_rows
from vlm_grpo.scoring import official_vqa_accuracy, vqa_accuracy, vqa_reward
from vlm_grpo.task import Reward, Sample, TaskAdapter, UserError

SHORT = "{question}\nAnswer the question using a single word or phrase."


@dataclass(frozen=True)
class Reference:
    """The target of a question: its answers (none if they are not public), its id in official files, and its groups,
    whose metrics are also reported separately."""

    answers: tuple[str, ...]
    question_id: int | str
    groups: tuple[str, ...] = ()
    thought: str = ""


class QuestionAnswering(TaskAdapter):
    """A task with one image, one question and one short answer.

    `data` is a folder that the task's data script made, or "hub" for the rows of `repository`, if the task has one.
    `limit` is the maximum number of samples of a split. `question` is the prompt's text, which contains {question}.
    """

    script: ClassVar[str] = ""
    """The module in data_scripts that makes the folder."""
    repository: ClassVar[str | None] = None
    """A data set on the hub whose rows hold question, answers and image."""
    repository_config: ClassVar[str | None] = None
    hub_splits: ClassVar[Mapping[str, str]] = HUB_SPLITS
    """The hub's names of the splits that are named differently in the official files."""
    id_column: ClassVar[str | None] = None
    """The column of the hub's rows that is unique; None to number them."""
    template: ClassVar[str] = SHORT
    note: ClassVar[str] = ""

    def __init__(self, data: str | None = None, limit: int | None = None, question: str | None = None):
        hub = f" or 'hub' for the rows of {self.repository}" if self.repository else ""
        self.advice = f"Give task_args.data: a folder made by `python -m data_scripts.{self.script}`{hub}."
        if data is None or (data == "hub" and self.repository is None):
            raise UserError(f"task {self.script} has no data{'' if data is None else ' on the hub'}. {self.advice}")
        check_limit(limit)
        question = question or self.template
        if "{question}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{question}}")
        self.data, self.limit, self.question = data, limit, question
        self.metric_note = f"{self.note}; data: {self.repository if data == 'hub' else data}"

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data != "hub":
            return read_rows(
                self.data, split, self._of_row, self.script, self.limit, ("image", "question", "answers", "question_id")
            )
        assert self.repository is not None, "checked when the task was made"
        rows = load_hub(self.repository, self.repository_config, self.hub_splits.get(split, split), self.advice)
        return read_hub_rows(rows, split, self.id_column, self._of_hub_row, self.limit)

    def _of_row(self, row: dict[str, Any], folder: Path) -> Sample:
        reference = Reference(tuple(row["answers"]), row["question_id"], tuple(row.get("groups", ())))
        return self._sample(row["id"], [folder / row["image"]], row["question"], reference)

    def _of_hub_row(
        self, sample_id: str, number: int, split: str, row: Mapping[str, Any], images: Sequence[Image.Image]
    ) -> Sample:
        asked = self.of_hub(split, number, row)
        reference = Reference(tuple(asked.answers), asked.question_id, tuple(asked.groups))
        return self._sample(sample_id, images, asked.question, reference)

    def of_hub(self, split: str, number: int, row: Mapping[str, Any]) -> Asked:
        """The question of a row of the hub, for tasks that read the hub."""
        raise NotImplementedError

    def _sample(self, sample_id: str, images: Sequence[Any], question: str, reference: Reference) -> Sample:
        return Sample(sample_id, images, self.question.replace("{question}", question), reference)

    @abstractmethod
    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        """The parts of the reward, including the headline. The best answer has 1 for each part."""

    def value(self, answers: Sequence[str], answer: str, parts: Mapping[str, float]) -> float:
        """The reward, given its parts: by default the headline."""
        return parts[self.headline]

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        """The reward of an answer; None if the reference answers are not public, which allows official files only."""
        answers = sample.target.answers
        return self._reward(answers, answer) if answers else None

    def _reward(self, answers: Sequence[str], answer: str) -> Reward:
        parts = self.parts(answers, answer)
        return Reward(self.value(answers, answer, parts), parts)

    def reference_answer(self, sample: Sample) -> str:
        """The reference answer with the greatest reward; among equals, the one with the greatest headline."""
        answers = sample.target.answers
        if not answers:
            raise UserError(
                f"sample {sample.id!r} has no reference answer: its row has none, as where they are not public."
            )
        rewards = {answer: self._reward(answers, answer) for answer in answers}
        return max(answers, key=lambda answer: (rewards[answer].value, rewards[answer].parts[self.headline]))

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def groups(self, sample: Sample) -> Sequence[str]:
        return sample.target.groups


class SoftAccuracy(QuestionAnswering):
    """A task whose questions ten people answered; the more people gave an answer, the more it earns.

    The reward is the soft accuracy of normalised answers, divided by that of the best of the people's answers, so every
    question can earn full marks. The metric is the official accuracy, which is not divided. An answer that is empty
    after normalisation ("the", "?") earns 0, unless a person gave the same characters.
    """

    headline: ClassVar[str] = "accuracy"
    note: ClassVar[str] = (
        "accuracy: the official VQA evaluation's, which does not normalise where all people answered the same; "
        "normalised_accuracy: both sides always normalised"
    )
    result_file: ClassVar[str] = "vqa_results.json"

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        return {
            "accuracy": official_vqa_accuracy(answer, answers),
            "normalised_accuracy": vqa_accuracy(answer, answers),
        }

    def value(self, answers: Sequence[str], answer: str, parts: Mapping[str, float]) -> float:
        return vqa_reward(answer, answers)

    def official_files(self, samples: Sequence[Sample], answers: Sequence[str]) -> dict[str, bytes]:
        """The result file of the VQA challenges: a JSON array of {"question_id", "answer"}."""
        return {self.result_file: result_json(samples, answers, "question_id", "answer")}


def result_json(samples: Sequence[Sample], answers: Sequence[str], id_key: str, answer_key: str) -> bytes:
    """A JSON array with one object of id and answer for each sample, as challenge servers expect."""
    rows = [
        {id_key: sample.target.question_id, answer_key: answer.strip()}
        for sample, answer in zip(samples, answers, strict=True)
    ]
    return json.dumps(rows, ensure_ascii=True).encode()
