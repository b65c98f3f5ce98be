"""Geometry3K: problems with a diagram, whose answer is an expression or one of four options (arXiv 2105.04165)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tasks._rows import HUB_SPLITS, check_limit, load_hub, read_hub_rows, read_rows
from vlm_grpo.scoring.mathematics import chosen_option, final_expression, load_math_verify, math_equal, option_letters
from vlm_grpo.task import Reward, Sample, TaskAdapter, UserError

HUB = "hiyouga/geometry3k"
GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.geometry3k`, or 'hub' for the rows of "
    "hiyouga/geometry3k."
)


class Solution(NamedTuple):
    """The right answer; with options, `index` is the index of the right option."""

    answer: str
    options: tuple[str, ...] = ()
    index: int | None = None


class Geometry3K(TaskAdapter):
    """A task with a diagram and a question; the reward is 1 if the answer equals the reference mathematically, else 0.

    `choices` adds the four options to the question, for rows that have them: those of the original release and of the
    hub's later version. The letter of the right option, its text, or an equal expression is then right. math-verify
    decides equality, in a process with a time limit. `data` is a folder with {split}.jsonl or "hub". `limit` is the
    maximum number of samples of a split.
    """

    headline: ClassVar[str] = "accuracy"
    reward_timeout_s: ClassVar[float | None] = 10.0

    def __init__(self, data: str | None = None, limit: int | None = None, choices: bool = True):
        if data is None:
            raise UserError(f"task geometry3k has no data. {GET_DATA}")
        if not isinstance(choices, bool):
            raise UserError(f"task_args.choices is {choices!r}; accepted: true, false")
        check_limit(limit)
        self.data, self.limit, self.choices = data, limit, choices
        self.metric_note = (
            "accuracy: the answer equals the reference by math-verify (or chooses the right option, where options are "
            f"shown: {choices}); an answer that takes over {self.reward_timeout_s:g} s is wrong; "
            f"data: {HUB if data == 'hub' else data}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data != "hub":
            return read_rows(self.data, split, self._make, "geometry3k", self.limit, ("image", "problem", "answer"))
        rows = load_hub(HUB, None, HUB_SPLITS.get(split, split), GET_DATA)

        def make(sample_id: str, at: int, split: str, row: Mapping[str, Any], images: Sequence[Any]) -> Sample:
            return self._sample(sample_id, images, row, str(row["answer"]))

        return read_hub_rows(rows, split, None, make, self.limit, "images")

    def _make(self, row: dict[str, Any], folder: Path) -> Sample:
        return self._sample(row["id"], [folder / row["image"]], row, row["answer"])

    def _sample(self, sample_id: str, images: Sequence[Any], row: Mapping[str, Any], answer: str) -> Sample:
        options = tuple(row.get("choices") or ()) if self.choices else ()
        if options and answer not in options:
            raise ValueError(f"the answer {answer!r} is none of the choices {list(options)}")
        solution = Solution(answer, options, options.index(answer) if options else None)
        return Sample(sample_id, images, _question(row["problem"], options), solution)

    def reward(self, sample: Sample, answer: str) -> Reward:
        right = float(_is_right(sample.target, answer))
        return Reward(right, {"accuracy": right})

    def prepare_reward(self) -> None:
        load_math_verify()

    def overdue_reward(self, sample: Sample) -> Reward:
        return Reward(0.0, {"accuracy": 0.0})

    def reference_answer(self, sample: Sample) -> str:
        solution: Solution = sample.target
        return solution.answer if solution.index is None else option_letters(len(solution.options))[solution.index]

    def normalised(self, sample: Sample, answer: str) -> str:
        chosen = chosen_option(answer, sample.target.options)
        return "".join(final_expression(answer).split()) if chosen is None else option_letters(26)[chosen]


def _is_right(solution: Solution, answer: str) -> bool:
    if solution.options:
        chosen = chosen_option(answer, solution.options)
        if chosen is not None:
            return chosen == solution.index
    return math_equal(answer, solution.answer)


def _question(problem: str, options: Sequence[str]) -> str:
    question = re.sub(r"\s*<image>\s*", "", problem)
    letters = option_letters(len(options))
    return question + "".join(f"\n({letter}) {option}" for letter, option in zip(letters, options, strict=True))
