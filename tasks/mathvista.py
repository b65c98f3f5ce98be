"""MathVista: mathematical questions about pictures, multiple choice and free form (arXiv 2310.02255)."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from tasks._rows import check_limit, load_hub, read_hub_rows, read_rows
from vlm_grpo.scoring import edit_distance, extract_answer
from vlm_grpo.scoring.mathematics import chosen_option, option_letters
from vlm_grpo.scoring.quantities import extract_number
from vlm_grpo.task import Reward, Sample, TaskAdapter, UserError

HUB = "AI4Math/MathVista"
GET_DATA = f"Give task_args.data: a folder made by `python -m data_scripts.mathvista`, or 'hub' for the rows of {HUB}."
KINDS = {"multi_choice": ("text", "integer", "float", "list"), "free_form": ("integer", "float", "list", "text")}
CATEGORIES = ("question_type", "answer_type", "language", "source", "category", "task", "context", "grade", "skills")


class Problem(NamedTuple):
    """The target of a question. `answer` is empty if it is not published; `groups` are "task=…" and so on."""

    question_type: str
    answer_type: str
    answer: str
    choices: tuple[str, ...]
    precision: int
    groups: tuple[str, ...]


class MathVista(TaskAdapter):
    """A task with a picture and a question; the reward is 1 for the right option, number or list, else 0.

    Multiple choice: `chosen_option` reads the option's letter or text; an answer that chooses none or several is wrong.
    Numbers must be equal after rounding to the problem's precision, lists item by item.

    The metric `accuracy` instead applies the official normalisation (lupantech/MathVista, calculate_score.py), which
    takes the option with the least edit distance, and cuts decimals if an integer is asked for. It is also reported
    for the official groups, such as accuracy/task=geometry problem solving. `data` is a folder with {split}.jsonl or
    "hub". `limit` is the maximum number of samples of a split.
    """

    headline: ClassVar[str] = "accuracy"

    def __init__(self, data: str | None = None, limit: int | None = None):
        if data is None:
            raise UserError(f"task mathvista has no data. {GET_DATA}")
        check_limit(limit)
        self.data, self.limit = data, limit
        self.metric_note = (
            "accuracy: official normalisation of the answer that our rules extract (officially GPT-4 extracts it); an "
            f"empty answer is wrong; correct: the stricter training reward; data: {HUB if data == 'hub' else data}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data != "hub":
            keys = ("image", "question", "answer", "question_type", "answer_type")
            return read_rows(
                self.data, split, lambda row, f: _sample(row, [f / row["image"]]), "mathvista", self.limit, keys
            )
        rows = load_hub(HUB, None, split, GET_DATA)

        def make(sample_id: str, at: int, split: str, row: Mapping[str, Any], images: Sequence[Any]) -> Sample:
            return _sample({**row, "id": sample_id}, images)

        return read_hub_rows(rows, split, "pid", make, self.limit, "decoded_image")

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        """The reward of an answer; None if the reference is not published, as in the split `test`."""
        if not sample.target.answer:
            return None
        correct = float(_is_correct(sample.target, answer))
        return Reward(correct, {"correct": correct, "accuracy": float(official_hit(sample.target, answer))})

    def reference_answer(self, sample: Sample) -> str:
        problem: Problem = sample.target
        if not problem.answer:
            raise UserError(f"sample {sample.id!r} has no reference answer: its row has none, as in the split test.")
        if problem.question_type == "multi_choice":
            return option_letters(len(problem.choices))[problem.choices.index(problem.answer)]
        return problem.answer

    def is_correct(self, reward: Reward) -> bool:
        return reward.parts["correct"] == 1

    def normalised(self, sample: Sample, answer: str) -> str:
        return str(official_normalised(sample.target, answer))

    def groups(self, sample: Sample) -> Sequence[str]:
        return sample.target.groups


def _sample(row: dict[str, Any], images: Sequence[Any]) -> Sample:
    kind, answer_type, answer = row["question_type"], row["answer_type"], row["answer"]
    choices = tuple(str(choice) for choice in row.get("choices") or ())
    if kind not in KINDS or answer_type not in KINDS[kind]:
        raise ValueError(f"question_type {kind!r} with answer_type {answer_type!r}; known: {KINDS}")
    answer = "" if answer is None else answer
    if not isinstance(answer, str):
        raise ValueError(f"the answer is {answer!r}; it is text, empty where it is not published")
    if kind == "multi_choice" and answer and answer not in choices:
        raise ValueError(f"the answer {answer!r} is none of the choices {list(choices)}")
    about = {**(row.get("metadata") or {}), "question_type": kind, "answer_type": answer_type}
    groups = tuple(
        f"{category}={value}"
        for category in CATEGORIES
        if (values := about.get(category)) is not None
        for value in (values if isinstance(values, list) else [values])
    )
    precision = int(row.get("precision") or 0)
    question = row.get("query") or _question(row["question"], choices, row.get("unit"))
    return Sample(row["id"], images, question, Problem(kind, answer_type, answer, choices, precision, groups))


def _question(question: str, choices: Sequence[str], unit: str | None) -> str:
    letters = option_letters(len(choices))
    shown = "".join(f"\n({letter}) {choice}" for letter, choice in zip(letters, choices, strict=False))
    return question + (f" (Unit: {unit})" if unit else "") + (f"\nChoices:{shown}" if shown else "")


# ---- the training reward ----


def _is_correct(problem: Problem, answer: str) -> bool:
    if problem.question_type == "multi_choice":
        return chosen_option(answer, problem.choices) == problem.choices.index(problem.answer)
    if problem.answer_type == "list":
        given, wanted = _numbers(answer), _numbers(problem.answer)
        return given is not None and given == wanted
    number, wanted = extract_number(answer), extract_number(problem.answer)
    if problem.answer_type == "text" or wanted is None:
        return extract_answer(answer).strip().casefold() == problem.answer.strip().casefold()
    if number is None:
        return False
    places = 0 if problem.answer_type == "integer" else problem.precision
    return number == wanted if problem.answer_type == "integer" else round(number, places) == round(wanted, places)


def _numbers(text: str) -> list[Fraction] | None:
    """The numbers of a flat list such as "[1, 2.5]"; None for anything else."""
    text = extract_answer(text)
    start, end = text.find("["), text.find("]")
    if not 0 <= start < end < start + 1000 or "[" in text[end:]:
        return None
    numbers = [extract_number(item) for item in text[start + 1 : end].split(",")]
    return None if any(number is None for number in numbers) else [n for n in numbers if n is not None]


# ---- the official metric ----

ENDS_IN_FRACTION = re.compile(r"(?:\d\s*/\s*\d+|frac\s*\{[^{}]*\}\s*\{[^{}]*\})\W*$")


def official_normalised(problem: Problem, answer: str) -> str | None:
    """The answer, extracted by this module's rules and normalised as in calculate_score.py; None where that fails."""
    text = extract_answer(answer).strip()
    if problem.question_type == "multi_choice":
        chosen = chosen_option(answer, problem.choices)
        if chosen is not None or not text:
            return None if chosen is None else problem.choices[chosen]
        distances = [edit_distance(text[:1000], choice) for choice in problem.choices]
        return problem.choices[distances.index(min(distances))]
    if problem.answer_type in ("list", "text"):  # compared as text: "[1,2]" is not "[1, 2]"
        return text
    number = extract_number(answer)
    # calculate_score.py reads no fractions, and rounding would turn 4/5 into 0
    if number is None or abs(number) > 10**30 or ENDS_IN_FRACTION.search(text):
        return None
    return str(int(float(number))) if problem.answer_type == "integer" else str(round(float(number), problem.precision))


def official_hit(problem: Problem, answer: str) -> bool:
    """Whether the normalised answer is the reference, as text."""
    normalised = official_normalised(problem, answer)
    return normalised is not None and normalised.strip() == problem.answer.strip()
