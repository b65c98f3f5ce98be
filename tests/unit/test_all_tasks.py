"""Every task of the package keeps what any task promises: full marks for the reference, no crash, nothing to be gained
by spraying answers, metrics that can be resampled.

A task without generated data of its own has rows here, as its data script writes them.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm_grpo.common.errors import UserError
from vlm_grpo.evaluation.answering import score_predictions
from vlm_grpo.evaluation.measure import intervals
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task import Reward, Sample, TaskAdapter, check_task, find_task, known_tasks
from vlm_grpo.task.check import JUNK_ANSWERS

SIZE = (120, 80)  # of the images
COUNT = 5
NUMBERS = tuple(range(COUNT))


def questions(answers: Callable[[int], Sequence[str]], **more: Any) -> list[dict[str, Any]]:
    return [
        {"question": f"Which is number {i}?", "answers": list(answers(i)), "question_id": i, **more} for i in NUMBERS
    ]


COLOURS = ("red", "blue", "green", "yellow", "purple")
BOXES = [(8.0 + 10 * i, 6.0 + 8 * i, 40.0 + 10 * i, 30.0 + 8 * i) for i in NUMBERS]
TEN = [[COLOURS[i]] * (4 + i) + ["a " + COLOURS[(i + 1) % COUNT]] * (6 - i) for i in NUMBERS]
OPTIONS = ["12", "8", "5 \\sqrt{2}", "30"]

ROWS: dict[str, list[dict[str, Any]]] = {
    "textvqa": questions(TEN.__getitem__),
    "okvqa": questions(TEN.__getitem__, groups=["question_type/Other"]),
    "gqa": questions(lambda i: [COLOURS[i]], groups=["structural/query"]),
    "ocrvqa": questions(lambda i: [f"The Art of {COLOURS[i].title()}"], groups=["Arts"]),
    "docvqa": questions(lambda i: [f"{COLOURS[i]} ink, {1900 + i}", f"{COLOURS[i]} ink"], groups=["handwritten"]),
    "chartqa": questions(lambda i: [f"{12.5 * (i + 1)}" if i % 2 else COLOURS[i]], groups=["human"]),
    "clevr_count": questions(lambda i: [str(i + 1)]),
    "lisa_grounding": [{"expression": f"what is {c}", "bbox_xyxy": box} for c, box in zip(COLOURS, BOXES, strict=True)],
    "coco_detection": [
        {
            "image_id": 7 * i,
            "objects": [
                {"bbox_xyxy": box, "label": label, "category_id": number, "area": 300.0, "iscrowd": 0}
                for box, label, number in ((BOXES[i], "cat", 17), (BOXES[(i + 2) % COUNT], "dog", 18))
            ],
        }
        for i in NUMBERS
    ],
    "agd20k": [{"action": "hold", "object": "cup", "heat_map": f"map-{i}.png"} for i in NUMBERS],
    "geometry3k": [
        {"problem": f"Find x in figure {i}.", "answer": OPTIONS[i % 4], **({"choices": OPTIONS} if i % 2 else {})}
        for i in NUMBERS
    ],
    "mathvista": [
        {
            "question": "Which?",
            "answer": "8",
            "question_type": "multi_choice",
            "answer_type": "text",
            "choices": OPTIONS,
        },
        {"question": "How many?", "answer": "17", "question_type": "free_form", "answer_type": "integer"},
        {
            "question": "How long?",
            "answer": "1.5",
            "question_type": "free_form",
            "answer_type": "float",
            "precision": 1,
        },
        {"question": "Which years?", "answer": "[1990, 1991]", "question_type": "free_form", "answer_type": "list"},
        {"question": "How high?", "answer": "31", "question_type": "free_form", "answer_type": "integer"},
    ],
}
# One task whose reward is chosen: a case for each
ROWS |= {
    f"jsonl/{reward}": [{"question": f"Which is number {i}?", "answer": answer(i), **more} for i in NUMBERS]
    for reward, answer, more in (
        ("exact_match", lambda i: COLOURS[i], {}),
        ("vqa_accuracy", lambda i: TEN[i], {}),
        ("anls", lambda i: f"{COLOURS[i]} ink", {}),
        ("relaxed_accuracy", lambda i: str(12.5 * (i + 1)), {}),
        ("number", lambda i: str(7 * i), {}),
        ("math", lambda i: OPTIONS[i % 4], {}),
        ("multiple_choice", lambda i: "ABCD"[i % 4], {"options": OPTIONS}),
        ("box_iou", lambda i: BOXES[i], {}),
        ("points", lambda i: BOXES[i], {}),
        ("trajectory", lambda i: [[5 * i, 9 * i], [30, 20 + 9 * i], [40 + 9 * i, 70]], {}),
        ("detections", lambda i: [{"bbox_2d": BOXES[i], "label": "cat"}], {}),
    )
}
# An answer is a set of things, so that several answers together are another answer and no hedging
SETS = {"coco_detection", "jsonl/detections"}


@cache
def folder() -> Path:
    """Rows of every task in ROWS, and images for them."""
    import atexit
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="all-tasks-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    for i in NUMBERS:
        Image.new("RGB", SIZE, (40 * i, 90, 120)).save(path / f"{i}.png")
        y, x = np.mgrid[: SIZE[1], : SIZE[0]]
        peak = 255 * np.exp(-((x - 20 - 20 * i) ** 2 + (y - 40) ** 2) / 300)
        Image.fromarray(peak.astype(np.uint8)).save(path / f"map-{i}.png")
    for name, rows in ROWS.items():
        (path / name).mkdir(parents=True)
        about = {"width": SIZE[0], "height": SIZE[1]}
        for split in ("train", "val"):
            lines = [
                {"id": f"{split}-{i}", "image": str(path / f"{i}.png"), **about, **row} for i, row in enumerate(rows)
            ]
            for line in lines:
                if "heat_map" in line:
                    line["heat_map"] = str(path / line["heat_map"])
            (path / name / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Case:
    """A task, a few of its samples, and its reward as a run asks for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        task, _, reward = name.partition("/")
        args = {"data": str(folder() / name)} if name in ROWS else {}
        self.task: TaskAdapter = find_task(task, args | ({"reward": reward} if reward else {}), demo=True)
        split = self.task.samples("train")
        self.samples: list[Sample] = [split[i] for i in range(min(COUNT, len(split)))]
        self.worker = RewardWorker(self.task)
        self.golds = [self.task.reference_answer(sample) for sample in self.samples]
        began = time.perf_counter()
        self.values = [self.reward(sample, gold) for sample, gold in zip(self.samples, self.golds, strict=True)]
        self.cost_s = (time.perf_counter() - began) / len(self.samples)

    def scored(self, sample: Sample, answer: str) -> Reward:
        """The reward; one that hung has none, which is worth nothing."""
        return self.worker.score(sample, answer) or Reward(0.0)

    def reward(self, sample: Sample, answer: str) -> float:
        return self.scored(sample, answer).value

    def examples(self, wanted: int) -> int:
        """Fewer examples where a reward is slow."""
        return max(5, min(wanted, int(0.7 / max(self.cost_s, 1e-4))))

    @property
    def places(self) -> range:
        """Samples to look at one by one."""
        return range(2, 3 if self.cost_s > 0.02 else 4)


@cache
def case(name: str) -> Case:
    return Case(name)


TASKS = sorted({name for name in known_tasks() if name != "jsonl"} | {name for name in ROWS if "/" in name})


@pytest.mark.parametrize("name", TASKS)
def test_the_task_passes_its_check(name: str) -> None:
    check_task(case(name).task, limit=COUNT)


@pytest.mark.parametrize("name", known_tasks())
def test_an_argument_of_another_type_is_named(name: str) -> None:
    given = {"stage": 5} if name == "tiny_warm_start" else {"data": 5}
    with pytest.raises(UserError, match=rf"task_args\.{next(iter(given))} is 5; accepted: "):
        find_task(name, given)


PIECES = st.sampled_from(
    [
        *"[](){}<>,.:;-+/%$\\\"'`#= \n\t0123456789",
        *("nan", "1e999", "-inf", "None", "null", "true", "10**9", "½", "red", " or ", "(A)", "Answer: ", "#### "),
        *("\\boxed{", "\\frac{1}{2}", "\\sqrt", "```python\n", "```", "def f(x):\n"),
        *("<answer>", "</answer>", "<think>", "</think>", "<|box_start|>"),
        *('"bbox_2d": ', '"label": "cat"', '"point_2d": '),
    ]
)
NOISE = st.text(max_size=30) | st.lists(PIECES, max_size=25).map("".join) | st.sampled_from(JUNK_ANSWERS)


@st.composite
def answers(draw: st.DrawFn, golds: Sequence[str]) -> str:
    """Anything: noise, or a right answer that was cut, doubled, mixed with noise or with another one."""
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return draw(NOISE)
    gold = draw(st.sampled_from(list(golds)))
    first, last = sorted((draw(st.integers(0, len(gold))), draw(st.integers(0, len(gold)))))
    if kind == 1:
        return gold[:first] + gold[last:]
    if kind == 2:
        return gold[:first] + draw(NOISE) + gold[first:]
    if kind == 3:
        return gold[first:last] * draw(st.integers(1, 40))
    return draw(NOISE) + draw(st.sampled_from(list(golds))) + draw(NOISE) + gold


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_any_text_has_a_reward_between_nothing_and_the_reference(name: str) -> None:
    one = case(name)

    @given(st.data())
    @settings(
        max_examples=one.examples(150),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    def check(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(one.samples) - 1))
        answer = data.draw(answers(one.golds))
        reward = one.scored(one.samples[at], answer)
        assert 0 <= reward.value <= one.values[at] + 1e-9, f"{reward} for {answer!r}"
        assert all(math.isfinite(part) for part in reward.parts.values()), f"{reward} for {answer!r}"
        assert isinstance(one.task.is_correct(reward), bool) or not reward.parts
        assert isinstance(one.task.normalised(one.samples[at], answer), str)

    check()


@pytest.mark.parametrize("name", TASKS)
def test_white_space_around_an_answer_changes_nothing(name: str) -> None:
    one = case(name)

    @given(st.data(), st.text(" \n\t", max_size=4), st.text(" \n\t\r", max_size=4))
    @settings(max_examples=one.examples(30), deadline=None, database=None, derandomize=True)
    def check(data: st.DataObject, before: str, after: str) -> None:
        at = data.draw(st.integers(0, len(one.samples) - 1))
        answer = data.draw(st.sampled_from(one.golds) | st.sampled_from(["yes", "[1, 2, 30, 40]", "[[3, 4]]", "7", ""]))
        plain = one.scored(one.samples[at], answer)
        assert one.scored(one.samples[at], before + answer + after) == plain

    check()


def rotations(golds: Sequence[str]) -> list[list[str]]:
    return [[*golds[i:], *golds[:i]] for i in range(len(golds))]


def alike(gold: str) -> str:
    """Answers of another kind than the one that is asked for are no alternatives to it."""
    return "list" if "[" in gold else "number" if gold[:1].isdigit() else "words"


JOINS: dict[str, Callable[[Sequence[str]], str]] = {
    "comma": ", ".join,
    "or": " or ".join,
    "lines": "\n".join,
    "bare": "".join,
    "tags": lambda golds: "".join(f"<answer>{gold}</answer>" for gold in golds),
    "tags inside": lambda golds: "</answer><answer>".join(golds),
    "list": lambda golds: f"[{', '.join(golds)}]",
    "boxed": lambda golds: " ".join(f"\\boxed{{{gold}}}" for gold in golds),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_naming_several_answers_earns_no_more_than_naming_one_at_random(name: str) -> None:
    """In whatever order and form: over all rotations, the several earn at most the mean of each alone."""
    one = case(name)
    for at in one.places:
        sample, full = one.samples[at], one.values[at]
        golds = [gold for gold in dict.fromkeys(one.golds) if alike(gold) == alike(one.golds[at])]
        alone = [one.reward(sample, gold) for gold in golds]
        for how, join in JOINS.items():
            together = [one.reward(sample, join(order)) for order in rotations(golds)]
            if name in SETS:
                assert len(golds) == 1 or sum(together) / len(golds) < 0.75 * full, f"{how}: {together}"
            else:
                assert sum(together) <= sum(alone) + 1e-9, f"{how}: {together}, alone {alone}, of {golds}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_saying_an_answer_often_or_in_tags_earns_no_more(name: str) -> None:
    one = case(name)
    for at in one.places:
        sample = one.samples[at]
        for answer in dict.fromkeys(one.golds):
            plain = one.reward(sample, answer)
            for often in (answer * 3, "\n".join([answer] * 12), f"<answer>{answer}</answer>" * 5, f"{answer} {answer}"):
                assert one.reward(sample, often) <= plain + 1e-9, f"{often!r}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_huge_boxes_and_many_points_earn_little(name: str) -> None:
    one = case(name)
    if not one.task.coordinates:
        pytest.skip("no coordinates")
    width, height = SIZE if name in ROWS else one.samples[0].images[0].size  # type: ignore[union-attr]
    grid = [[x, y] for x in range(0, width, max(1, width // 5)) for y in range(0, height, max(1, height // 5))]
    whole = [0, 0, width, height]
    boxes = [[x, y, x + width / 4, y + height / 4] for x, y in grid]
    sprays = {
        "the whole image": json.dumps(whole),
        "a box far beyond it": json.dumps([-1e6, -1e6, 1e6, 1e6]),
        "the whole image of each label": json.dumps([{"bbox_2d": whole, "label": label} for label in ("cat", "dog")]),
        "boxes of each label": json.dumps([{"bbox_2d": b, "label": label} for b in boxes for label in ("cat", "dog")]),
        "boxes": json.dumps(boxes),
        "points": json.dumps(grid),
        "points again and again": json.dumps(grid * 3),
    }
    # Where points are asked for, a box is read as the one in its middle, which may happen to be right
    middle = {at: one.reward(one.samples[at], f"[[{width / 2}, {height / 2}]]") for at in one.places}
    for how, answer in sprays.items():
        for at in one.places:
            earned = one.reward(one.samples[at], answer)
            assert earned <= max(0.5 * one.values[at], middle[at] + 1e-9), f"{how}: {earned}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_file_of_predictions_gives_the_headline_with_its_interval(name: str, tmp_path: Path) -> None:
    """Right answers and junk in turn: the headline lies between those of either alone, and within its interval."""
    one = case(name)
    mixed = [gold if i % 2 == 0 else "I cannot tell." for i, gold in enumerate(one.golds)]
    found = {}
    for kind, written in (("right", one.golds), ("mixed", mixed), ("junk", ["I cannot tell."] * len(one.golds))):
        lines = [json.dumps({"id": s.id, "answer": answer}) for s, answer in zip(one.samples, written, strict=True)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines))
        evaluation = score_predictions(one.task, one.samples, tmp_path / f"{kind}.jsonl")
        assert evaluation.metrics["num_missing"] == 0 and all(math.isfinite(v) for v in evaluation.metrics.values())
        found[kind] = evaluation
    headline = one.task.headline
    values = [found[kind].metrics[headline] for kind in ("right", "mixed", "junk")]
    assert sorted(values) in (values, values[::-1]) and len(set(values)) == 3
    spans, note = intervals(one.task, one.samples, found["mixed"], resamples=60, seed=0)
    assert not note.startswith("none"), note
    assert spans[headline].low < values[1] < spans[headline].high


@pytest.mark.parametrize("name", TASKS)
def test_metrics_count_a_sample_as_often_as_it_stands_there(name: str) -> None:
    one = case(name)
    right, wrong = one.samples[0], one.samples[1]
    of_right = one.golds[0], one.scored(right, one.golds[0])
    of_wrong = "I cannot tell.", one.scored(wrong, "I cannot tell.")

    def headline(pairs: Sequence[tuple[Sample, tuple[str, Reward]]]) -> float:
        samples, given = [sample for sample, _ in pairs], [answer for _, answer in pairs]
        return one.task.metrics(samples, [a for a, _ in given], [r for _, r in given])[one.task.headline]

    once = headline([(right, of_right), (wrong, of_wrong)])
    thrice = headline([(right, of_right), *[(wrong, of_wrong)] * 3])
    assert abs(thrice - once) > 1e-6
    assert headline([(right, of_right)] * 2 + [(wrong, of_wrong)] * 2) == pytest.approx(once, abs=0.02)


@pytest.mark.parametrize("name", TASKS)
def test_official_files_hold_every_answer_and_can_be_read(name: str) -> None:
    one = case(name)
    for written in (one.golds, ["\ud800 no \u2028answer"] * len(one.golds), [""] * len(one.golds)):
        for file, content in one.task.official_files(one.samples, written).items():
            assert Path(file).name == file and isinstance(content, bytes)
            rows = json.loads(content)
            if name == "coco_detection":  # a row for each of the two boxes of a right answer, none for words
                expected = [(7 * i, category) for i in NUMBERS for category in (17, 18) if written is one.golds]
                assert [(row["image_id"], row["category_id"]) for row in rows] == expected
            else:
                given = [{str(value).casefold() for value in row.values()} for row in rows]
                assert len(given) == len(written)
                assert all(answer.strip().casefold() in row for answer, row in zip(written, given, strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_the_reference_is_correct_and_junk_is_not(name: str) -> None:
    one = case(name)
    for sample, gold in zip(one.samples, one.golds, strict=True):
        assert one.task.is_correct(one.scored(sample, gold))
        assert not one.task.is_correct(one.scored(sample, "I cannot tell."))
        assert one.task.normalised(sample, gold) == one.task.normalised(sample, f" {gold}\n")
