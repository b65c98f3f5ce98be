"""Reading a box out of a model's text, overlap, exact match and tags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_grpo.scoring import box_iou, exact_match, extract_answer, parse_box
from vlm_grpo.scoring.located import find_coordinates

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases/box_parsing.jsonl").read_text().splitlines()]
BOX = (120, 45, 388, 297)


@pytest.mark.parametrize("case", CASES, ids=[repr(case["text"][:40]) for case in CASES])
def test_a_box_is_read_as_a_careful_reader_reads_it(case):
    # Disputed rows have alternatives; ours is the first reading of every row.
    assert parse_box(case["text"]) == (None if case["box"] is None else tuple(case["box"]))


@pytest.mark.parametrize(
    "text",
    [
        "(x1, y1) = (120, 45) and (x2, y2) = (388, 297)",
        "<x1>120</x1><y1>45</y1>\n<x2>388</x2><y2>297</y2>",
        '<bbox x1="120" y1="45" x2="388" y2="297"/>',
        "top-left: 120, 45; bottom-right: 388, 297",
        '{"top_left": [120, 45], "bottom_right": [388, 297]}',
        '{"topLeft": {"x": 120, "y": 45}, "bottomRight": {"x": 388, "y": 297}}',
        '{"top_left_x": 120, "top_left_y": 45, "bottom_right_x": 388, "bottom_right_y": 297}',
        "bottom-right (388, 297), top-left (120, 45)",
        "| x1 | y1 | x2 | y2 |\n|---|---|---|---|\n| 120 | 45 | 388 | 297 |",
        "[120px, 45px, 388px, 297px]",
        "[120.  45. 388. 297.]",
        "左上角坐标为(120, 45)\uff0c右下角坐标为(388, 297)",
        "\uff08120\uff0c45\uff09\uff0c\uff08388\uff0c297\uff09",
        "$\\boxed{[120, 45, 388, 297]}$",
        "x_min: 120\nx_max: 388\ny_min: 45\ny_max: 297",
        "x\u2081=120, y\u2081=45, x\u2082=388, y\u2082=297",
        "**x1**: 120, **y1**: 45, **x2**: 388, **y2**: 297",
        '{"x": 120, "y": 45, "width": 268, "height": 252}',
        "cx=254, cy=171, w=268, h=252",
        "The left is 120, top is 45, right is 388, and bottom is 297.",
        "x0: 120, y0: 45, x1: 388, y1: 297",
        "from 120, 45 to 388, 297",
        "120,45 - 388,297",
        "(120, 45) \u2192 (388, 297)",
        "120 45, 388 297",
        "[120;45;388;297]",
        "[1.2e2, 4.5e1, 3.88e2, 2.97e2]",
        "<loc_120><loc_45><loc_388><loc_297>",
        "In image 2, the dog is at [120, 45, 388, 297] (confidence 0.93).",
        "1. [120, 45, 388, 297]",
        "<THINK>a</THINK><ANSWER>[120,45,388,297]</ANSWER>",
        "[\u0661\u0662\u0660, 45, 388, 297]",
        "[120,\u200945,\u2009388,\u2009297]",
    ],
)
def test_more_of_the_same_kinds_are_read(text):
    assert parse_box(text) == BOX


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(1, 2), (3, 4), (5, 6)",
        "[1, 2, 3, 4, 5]",
        "[1, 2, 3, null]",
        "[[1, 2, 3], [4, 5, 6]]",
        "192.168.0.1",
        "version 1.2.3.4",
        "12/05/2024",
        "10:30:15, 11",
        "The dog is at (120, 45) and the cat is at (388, 297).",
        "man1 man2 man3 man4",
        "[inf, 1, 2, 3]",
        "1e999 1e999 1e999 1e999",
        "[9999999999999999, 1, 2, 3]",
        "<think>[120, 45, 388, 297]",
        "[120, 45, 388, 297]</think> none",
    ],
)
def test_what_is_no_box_is_not_read_as_one(text):
    assert parse_box(text) is None


def test_the_first_box_is_the_answer():
    assert parse_box("[1, 2, 3, 4] [5, 6, 7, 8]") == (1, 2, 3, 4)
    assert parse_box("<answer>[1, 2, 3, 4]</answer><answer>[5, 6, 7, 8]</answer>") == (1, 2, 3, 4)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 7, 1e4])
def test_the_size_of_the_numbers_decides_nothing(scale):
    for text in (
        "[{}, {}, {}, {}]",
        "({},{}),({},{})",
        "x1={} y1={} x2={} y2={}",
        "{} {} {} {}",
        "({}, {}) to ({}, {})",
    ):
        numbers = [round(value * scale, 6) for value in BOX]
        assert parse_box(text.format(*numbers)) == pytest.approx(numbers)


def test_points_are_located_but_are_no_boxes():
    located = find_coordinates("At (12, 30), then {'x': 5, 'y': 6}; trail [[1, 2], [3, 4], [5, 6]].")
    assert [item.xyxy for item in located] == [None] * 5
    assert [[number.value for number in item.coordinates] for item in located] == [
        [12, 30],
        [5, 6],
        [1, 2],
        [3, 4],
        [5, 6],
    ]


def test_located_numbers_stand_where_they_say():
    text = 'a {"bbox_2d": ["+14", 22.50, -3, 7e1]} \uff08\uff11\uff0c2\uff09'
    numbers = [number for item in find_coordinates(text) for number in item.coordinates]
    assert [text[number.start : number.end] for number in numbers] == ["+14", "22.50", "-3", "7e1", "\uff11", "2"]
    assert [number.axis for number in numbers] == ["x", "y", "x", "y", "x", "y"]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=80), st.text("0123456789.,-+ ()[]{}<>/:=\"'x1y2eE|answerthink\n", max_size=80)))
def test_any_text_has_a_box_or_none(text):
    box = parse_box(text)
    assert box is None or (len(box) == 4 and all(isinstance(side, float) and abs(side) < 1e16 for side in box))
    extract_answer(text)


@pytest.mark.slow
def test_time_grows_with_the_length_of_the_text_only():
    # In a process of its own, free of the shape checks of this one. 0.2 million characters of each kind take below
    # 0.1 s per 20,000; anything quadratic would take minutes.
    program = """
import time
from vlm_grpo.scoring import parse_box
kinds = ["1 ", "(", "(1,2),", "<", '"', "1", " ", "x1: 1 ", "top left ", "<answer>", "</think>", "[1,2,3,4],", "1,",
         "(1,2", "1.", "<loc0001>", "-", "left: ", '1"', "(1,2) width 3 ", "1e", "< ", "(1,2) to ", "x", "1. "]
for kind in kinds:
    start = time.process_time()
    parse_box("<answer" + kind * (200_000 // len(kind)))
    assert time.process_time() - start < 10, kind
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)


def test_iou_by_hand():
    assert box_iou((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert box_iou((0, 0, 10, 10), (5, 5, 15, 15)) == pytest.approx(25 / 175)
    assert box_iou((0, 0, 10, 10), (10, 0, 20, 10)) == 0  # they only touch
    assert box_iou((0.25, 0, 0.75, 1), (0, 0, 1, 1)) == pytest.approx(0.5)  # continuous: no pixel is added
    assert box_iou((10, 10, 0, 0), (0, 0, 10, 10)) == 0  # corners swapped
    assert box_iou((5, 5, 5, 5), (5, 5, 5, 5)) == 0


boxes = st.tuples(*[st.integers(0, 12)] * 4).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@given(boxes, boxes)
def test_iou_equals_counting_cells(first, second):
    def cells(box):
        return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}

    both, either = cells(first) & cells(second), cells(first) | cells(second)
    assert box_iou(first, second) == pytest.approx(len(both) / len(either) if either else 0)
    assert box_iou(first, second) == box_iou(second, first)


def test_exact_match_ignores_case_and_surrounding_space():
    assert exact_match(" Yes\n", "yes") == 1.0
    assert exact_match("no", ["yes", "NO "]) == 1.0
    assert exact_match("yes please", ["yes"]) == 0.0
    assert exact_match("", []) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think><answer> 7 </answer>", "7"),
        ("<think>the <answer>x</answer> tag</think>\n<answer>7</answer> bye", "7"),
        ("a</think>7", "7"),
        ("7</answer>", "7"),
        ("7", "7"),
        ("<think>a", ""),
        ("7 <think>a", "7"),
        ("<answer>7<answer>", "7"),
        ("<think>a<answer>7</answer>", "7"),
    ],
)
def test_the_answer_is_found_between_its_tags(text, answer):
    assert extract_answer(text) == answer
