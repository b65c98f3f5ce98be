"""Boxes between original pixels and the spaces that models speak, on images that are not square."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.coordinates import CoordinateSpace, instruction, to_model, to_original
from vlm_grpo.scoring import parse_box

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases/box_parsing.jsonl").read_text().splitlines()]
SPACES = list(CoordinateSpace)


def test_resized_pixels_scale_each_axis_by_its_own_factor():
    # 640x478 resized to multiples of 28: 644x476. x grows by 644/640, y shrinks by 476/478.
    text = to_model("[320, 239, 640, 478]", CoordinateSpace.RESIZED_PIXELS, (640, 478), (644, 476))
    assert text == "[322, 238, 644, 476]"
    back = to_original("[322, 238, 644, 476]", CoordinateSpace.RESIZED_PIXELS, (640, 478), (644, 476))
    assert back == "[320, 239, 640, 478]"


def test_thousandths_do_not_depend_on_the_resized_size():
    for resized in ((28, 28), (2000, 10)):
        assert to_model("[60, 50, 120, 100]", CoordinateSpace.THOUSAND, (120, 200), resized) == "[500, 250, 1000, 500]"
        assert to_original("(1, 1)", CoordinateSpace.THOUSAND, (640, 480), resized) == "(0.64, 0.48)"


def test_unit_shares_have_three_decimals():
    assert to_model("[1, 2, 640, 479]", CoordinateSpace.UNIT, (640, 480), (1, 1)) == "[0.002, 0.004, 1, 0.998]"
    assert to_original("[0.112, 0.5, 1, 1.0]", CoordinateSpace.UNIT, (640, 480), (1, 1)) == "[71.68, 240, 640, 480]"


def test_the_space_is_never_guessed_from_the_values():
    # Each of these would be taken for another space by its size alone.
    assert to_original("[0, 0, 1, 1]", CoordinateSpace.THOUSAND, (500, 400), (504, 392)) == "[0, 0, 0.5, 0.4]"
    assert to_original("[0, 0, 1, 1]", CoordinateSpace.RESIZED_PIXELS, (50, 40), (100, 80)) == "[0, 0, 0.5, 0.5]"
    assert to_original("[100, 100, 900, 900]", CoordinateSpace.RESIZED_PIXELS, (500, 500), (1000, 1000)) == (
        "[50, 50, 450, 450]"
    )
    assert to_original("[10, 20, 30, 40]", CoordinateSpace.UNIT, (2, 3), (28, 28)) == "[20, 60, 60, 120]"


def test_only_boxes_and_points_change():
    text = 'Of 3 dogs, man 2 {"bbox_2d": [10, 20, 30, 40], "label": "bus 42"} is at (5, 6) on 2024-05-12, v1.2'
    assert to_original(text, CoordinateSpace.RESIZED_PIXELS, (200, 400), (100, 100)) == (
        'Of 3 dogs, man 2 {"bbox_2d": [20, 80, 60, 160], "label": "bus 42"} is at (10, 24) on 2024-05-12, v1.2'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y2=40, x1=10, x2=30, y1=20", "y2=160, x1=20, x2=60, y1=80"),
        ("(10, 20) with width 20 and height 30", "(20, 80) with width 40 and height 120"),
        ("<loc0020><loc0010><loc0040><loc0030>", "<loc80><loc20><loc160><loc60>"),
        ("[10., 20., 30., 40.].", "[20., 80., 60., 160.]."),
        ("[-5, +6, \uff11\uff10, 007]", "[-10, 24, 20, 28]"),
        ("[[1, 2], [3, 4], [5, 6]]", "[[2, 8], [6, 16], [10, 24]]"),
        ("12, 30", "24, 120"),
        ("x: 1, y: 2", "x: 2, y: 8"),
        ("no numbers", "no numbers"),
    ],
)
def test_numbers_are_scaled_along_the_axis_they_stand_for(text, expected):
    assert to_original(text, CoordinateSpace.RESIZED_PIXELS, (200, 400), (100, 100)) == expected


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_reading_after_converting_equals_converting_what_was_read(space, case):
    original, resized = (613, 417), (616, 420)
    unit = {
        CoordinateSpace.RESIZED_PIXELS: (613 / 616, 417 / 420),
        CoordinateSpace.THOUSAND: (0.613, 0.417),
        CoordinateSpace.UNIT: (613, 417),
    }[space]
    _same(parse_box(to_original(case["text"], space, original, resized)), parse_box(case["text"]), unit, 0.02)


sides = st.integers(1, 3000)
numbers = st.one_of(
    st.integers(0, 4000).map(str),
    st.floats(-10, 4000).map(lambda value: f"{value:.3f}"),
    st.floats(0, 1).map(lambda value: f"{value:.6g}"),
)
layouts = st.sampled_from([case["text"] for case in CASES if case["box"]])


@settings(max_examples=40, deadline=None)
@given(layouts, st.lists(numbers, min_size=16, max_size=16), st.tuples(sides, sides), st.tuples(sides, sides))
def test_reading_and_converting_commute_for_any_numbers_and_sizes(layout, values, original, resized):
    text = _with_numbers(layout, values)
    space = CoordinateSpace.RESIZED_PIXELS
    factor = (original[0] / resized[0], original[1] / resized[1])
    _same(parse_box(to_original(text, space, original, resized)), parse_box(text), factor, 0.0101)


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("0123456789.,-+ ()[]{}<>/:=\"'x1y2 awhtop leftright\n"), max_size=60))
def test_reading_and_converting_commute_for_any_text(text):
    converted = to_original(text, CoordinateSpace.RESIZED_PIXELS, (300, 700), (100, 100))
    before, after = parse_box(text), parse_box(converted)
    if before is None or all(abs(value) < 1e9 for value in before):
        _same(after, before, (3, 7), 0.0101)


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(0, 400)] * 4), st.sampled_from(SPACES))
def test_there_and_back_stays_within_half_a_unit(box, space):
    original, resized = (400, 500), (392, 504)
    back = parse_box(to_original(to_model(str(list(box)), space, original, resized), space, original, resized))
    half_unit = {"resized_pixels": 0.52, "thousand": 0.26, "unit": 0.26}[space]  # in original pixels, and 0.005
    assert back == pytest.approx(box, abs=half_unit + 0.006)


@pytest.mark.parametrize("space", SPACES)
def test_the_instruction_states_the_space(space):
    sentence = instruction(space, (308, 196))
    assert {"resized_pixels": "308 wide and 196 high", "thousand": "0 to 1000", "unit": "0 to 1"}[space] in sentence


def test_an_empty_image_is_refused():
    with pytest.raises(UserError, match="0x10"):
        to_model("[1, 2, 3, 4]", CoordinateSpace.THOUSAND, (0, 10), (28, 28))


def test_conversion_leaves_no_more_than_two_decimals():
    rng = random.Random(0)
    for _ in range(100):
        text = str([rng.uniform(0, 1000) for _ in range(4)])
        converted = to_original(text, CoordinateSpace.THOUSAND, (333, 777), (28, 28))
        assert all(len(number.partition(".")[2]) <= 2 for number in converted.strip("[]").split(", "))


def _same(actual, before, factor, tolerance):
    if before is None:
        assert actual is None
    else:
        x, y = factor
        assert actual == pytest.approx([before[0] * x, before[1] * y, before[2] * x, before[3] * y], abs=tolerance)


def _with_numbers(layout, values):
    """The layout with the numbers of its boxes and points replaced, found by an expression of this test's own."""
    import re

    replacements = iter(values * 4)
    pattern = re.compile(r"(?<![\w.])-?\d+\.?\d*(?=[\s,)\]}<\"/.;]|$)", re.ASCII)
    return pattern.sub(lambda _: next(replacements), layout)
