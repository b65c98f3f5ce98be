"""GSM8K: grade-school word problems without images, whose answer is a number (arXiv 2110.14168)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tasks._generated.problems import make_sum
from tasks._rows import check_limit, load_hub, read_rows
from vlm_grpo.scoring.quantities import extract_number
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError

HUB = ("openai/gsm8k", "main")
SUMS = {"train": 4096, "val": 256, "test": 256}  # split: sums where no limit is given
GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.gsm8k`, 'hub' for the rows of openai/gsm8k, or "
    "'sums' for generated sums of two digits."
)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


class GSM8K(TaskAdapter):
    """A task of word problems; the reward is 1 if the answer's number exactly equals the solution's, else 0.

    `extract_number` reads one number from the answer: 18, $18.00, "#### 18", \\boxed{18}. `data` is a folder with
    {split}.jsonl, "hub" or "sums". `limit` is the maximum number of samples of a split.
    """

    headline: ClassVar[str] = "accuracy"
    demo_args: ClassVar[dict[str, Any]] = {"data": "sums"}

    def __init__(self, data: str | None = None, limit: int | None = None):
        if data is None:
            raise UserError(f"task gsm8k has no data. {GET_DATA}")
        check_limit(limit)
        self.data, self.limit = data, limit
        source = {"sums": "generated sums", "hub": HUB[0]}.get(data, data)
        self.metric_note = (
            "accuracy: the answer's number equals the solution's exactly; an answer without a number counts as wrong; "
            f"data: {source}"
        )

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "sums":
            return _sums(split, self.limit)
        if self.data == "hub":
            rows: Any = load_hub(*HUB, split, GET_DATA)
            count = len(rows) if self.limit is None else min(self.limit, len(rows))
            ids = [f"{split}-{number}" for number in range(count)]
            return LazySamples(ids, lambda at: _sample({**rows[at], "id": ids[at]}))
        keys = ("question", "answer")
        return read_rows(self.data, split, lambda row, _: _sample(row), "gsm8k", self.limit, keys)

    def reward(self, sample: Sample, answer: str) -> Reward:
        number = extract_number(answer)
        right = float(number is not None and number == extract_number(sample.target))
        return Reward(right, {"accuracy": right, "parsed": float(number is not None)})

    def reference_answer(self, sample: Sample) -> str:
        return sample.target.rpartition("####")[2].strip()

    def reference_thought(self, sample: Sample) -> str:
        """The steps of the solution, without calculator annotations."""
        return _ANNOTATION.sub("", sample.target.rpartition("####")[0]).strip()

    def normalised(self, sample: Sample, answer: str) -> str:
        number = extract_number(answer)
        return answer.strip().casefold() if number is None else str(number)


def _sample(row: dict[str, Any], _: Path | None = None) -> Sample:
    question, solution = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(solution, str) or extract_number(solution) is None:
        raise ValueError(f"question and answer must be text, the answer with a number behind ####; it is {solution!r}")
    return Sample(row["id"], [], question, solution)


def _sums(split: str, limit: int | None) -> LazySamples:
    if split not in SUMS:
        raise UserError(f"generated sums have no split {split!r}; they have: {', '.join(SUMS)}")
    ids = [f"{split}-{index:05d}" for index in range(limit or SUMS[split])]

    def make(index: int) -> Sample:
        return _sample({**make_sum(split, index), "id": ids[index]})

    return LazySamples(ids, make)
