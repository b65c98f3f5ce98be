"""Programming: Python functions checked by unit tests. MBPP, HumanEval, or any questions with tests.

An answer and its tests run in two confined child processes. `tasks/_sandbox.py` says what the confinement prevents,
what it does not prevent, and what the machine needs for it. The task needs Linux.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from tasks._generated.problems import examples
from tasks._hub_rows import row_of
from tasks._rows import HUB_SPLITS, check_limit, load_hub, read_rows
from tasks._sandbox import Limits, missing_layers, run_answer
from tasks._unit_tests import name_of_pythons
from vlm_grpo.scoring import extract_answer
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError

HUB: dict[str, tuple[str, str | None]] = {
    "mbpp": ("google-research-datasets/mbpp", "full"),
    "humaneval": ("openai/openai_humaneval", None),
}
MOST_CHARACTERS = 50_000  # of an answer
GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.code`, 'hub' for the rows of MBPP or HumanEval "
    "(task_args.dataset), or 'examples' for a few small functions."
)
ASK = "Answer with the Python code alone."
_CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class Exercise(NamedTuple):
    """The tests of an answer; `setup` runs before the answer and before the tests."""

    tests: str | tuple[str, ...]
    setup: str
    entry_point: str | None
    reference: str


class Code(TaskAdapter):
    """A task whose answer is a Python function; the reward is the share of the tests that pass.

    `data` is a folder with {split}.jsonl, "examples", or "hub" with `dataset` "mbpp" (the default) or "humaneval".
    `limit` is the maximum number of samples of a split. `shown_tests` is the number of tests that the question shows if
    it has a list of them; None shows all. `timeout_s`, `memory_mb` and `file_mb` limit all tests of one answer
    together; the time starts when the answer's process is ready.
    """

    headline: ClassVar[str] = "all_passed"
    reward_threads: ClassVar[int] = min(16, _CORES)  # each waits for its two children
    demo_args: ClassVar[dict[str, Any]] = {"data": "examples"}

    def __init__(
        self,
        data: str | None = None,
        dataset: str | None = None,
        limit: int | None = None,
        shown_tests: int | None = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        file_mb: int = 1,
    ):
        if data is None:
            raise UserError(f"task code has no data. {GET_DATA}")
        if dataset is not None and data != "hub":
            raise UserError(
                f"task_args.dataset={dataset!r} names rows of the hub, and task_args.data is {data!r}: leave dataset "
                "out, or set task_args.data to 'hub'"
            )
        dataset = "mbpp" if dataset is None else dataset
        if dataset not in HUB:
            raise UserError(f"task_args.dataset is {dataset!r}; accepted: {', '.join(HUB)}")
        check_limit(limit)
        for name, value, least in (
            ("timeout_s", timeout_s, 0.2),
            ("memory_mb", memory_mb, 64),
            ("file_mb", file_mb, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise UserError(f"task_args.{name} is {value!r}; accepted: a number from {least}")
        if shown_tests is not None and (
            isinstance(shown_tests, bool) or not isinstance(shown_tests, int) or shown_tests < 0
        ):
            raise UserError(
                f"task_args.shown_tests is {shown_tests!r}; accepted: a whole number from 0, or nothing for all"
            )
        self.data, self.dataset, self.limit, self.shown_tests = data, dataset, limit, shown_tests
        self.limits = Limits(float(timeout_s), int(memory_mb), int(file_mb))
        shown = "all" if shown_tests is None else shown_tests
        source = HUB[dataset][0] if data == "hub" else data
        self.metric_note = (
            f"all_passed is pass@1; {timeout_s:g} s, {memory_mb} MiB for all tests of an answer; tests shown in the "
            f"question: {shown} of a list; data: {source}"
        )
        if missing := missing_layers():
            self.metric_note += f"; THE SANDBOX LACKS {', '.join(missing)} here (see tasks/_sandbox.py)"

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data == "examples":
            return _examples(split, self._sample, self.limit)
        if self.data == "hub":
            return self._hub(split)
        keys = ("question", "tests")
        return read_rows(self.data, split, lambda row, folder: self._sample(row), "code", self.limit, keys)

    def _hub(self, split: str) -> LazySamples:
        repository, config = HUB[self.dataset]
        rows = load_hub(repository, config, HUB_SPLITS.get(split, split), GET_DATA)
        count = len(rows) if self.limit is None else min(self.limit, len(rows))
        ids = [f"{split}-{task}" for task in rows["task_id"][:count]]
        return LazySamples(ids, lambda at: self._sample({**row_of(rows[at]), "id": ids[at]}))

    def _sample(self, row: dict[str, Any]) -> Sample:
        tests: Any = row["tests"]
        setup, entry = row.get("setup") or "", row.get("entry_point")
        is_list = isinstance(tests, list) and bool(tests) and all(isinstance(test, str) for test in tests)
        if not (is_list or (isinstance(tests, str) and tests.strip())) or not isinstance(setup, str):
            raise ValueError("tests must be a list of programs, or one program")
        if entry is not None and not isinstance(entry, str):
            raise ValueError(f"entry_point is {entry!r}; it is the name of a function, or null")
        question = row["question"]
        shown = tests[: self.shown_tests] if is_list else []
        if shown:
            question += "\nThe code must pass tests such as:\n" + "\n".join(shown)
        programs = tuple(tests) if isinstance(tests, list) else str(tests)
        reference = row.get("reference") or ""
        exercise = Exercise(programs, setup, entry or name_of_pythons(tests, reference), reference)
        return Sample(row["id"], [], f"{question}\n{ASK}", exercise)

    def reward(self, sample: Sample, answer: str) -> Reward:
        """The share of tests that pass; part `all_passed` is 1 if all do. Code that cannot be the answer is not run."""
        exercise: Exercise = sample.target
        code = find_code(answer, exercise)
        if code is None:
            return Reward(0.0, {"all_passed": 0.0, "has_code": 0.0})
        outcome = run_answer(code, exercise.tests, exercise.setup, exercise.entry_point, self.limits)
        share = sum(outcome.passed) / len(outcome.passed)
        return Reward(share, {"all_passed": float(all(outcome.passed)), "has_code": 1.0})

    def reference_answer(self, sample: Sample) -> str:
        if not sample.target.reference:
            raise UserError(f"sample {sample.id!r} has no reference: give its row the key reference, the right code.")
        return f"```python\n{sample.target.reference.strip(chr(10))}\n```"


_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_DEFINES = r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b|^{name}[ \t]*(?::[^=\n]*)?="


def find_code(answer: str, exercise: Exercise) -> str | None:
    """The program in an answer; None if there is none.

    In an answer with fences, it is the first fenced block that defines the entry point, or any function if the exercise
    names no entry point. An answer without fences is the program itself. If the question is the beginning of a
    function, the answer may also be its continuation.
    """
    text = extract_answer(answer) if "</think>" in answer or "<answer>" in answer else answer
    if len(text) > MOST_CHARACTERS:
        return None
    blocks = [block for _, block in _FENCE.findall(text)] or [text]
    name = re.escape(exercise.entry_point) if exercise.entry_point else r"\w+"
    defines = re.compile(_DEFINES.replace("{name}", name), re.MULTILINE)
    for block in blocks:
        if defines.search(block):
            return block.encode("utf-8", "replace").decode()
    if exercise.entry_point and defines.search(exercise.setup) and re.match(r"\n*[ \t]+\S", blocks[0]):
        return exercise.setup.rstrip() + "\n" + blocks[0].lstrip("\n").encode("utf-8", "replace").decode()
    return None


def _examples(split: str, make: Any, limit: int | None) -> LazySamples:
    rows = examples(split)
    if not rows:
        raise UserError(f"the examples have no split {split!r}; they have: train, val, test")
    rows = rows[:limit]
    return LazySamples([row["id"] for row in rows], lambda at: make(rows[at]))
