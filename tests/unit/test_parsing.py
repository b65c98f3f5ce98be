"""Points, paths and detections in answers, and their conversion between original pixels and what models speak."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_grpo.model.coordinates import CoordinateSpace, to_model, to_original
from vlm_grpo.scoring import parse_box
from vlm_grpo.scoring.located import find_labels
from vlm_grpo.scoring.parsing import Detection, parse_detections, parse_points, parse_trajectory

SPACES = list(CoordinateSpace)
THREE = [(12, 30), (50, 60.5), (7, 8)]

PATHS = [
    "[[12, 30], [50, 60.5], [7, 8]]",
    "[(12, 30), (50, 60.5), (7, 8)]",
    "(12,30) (50,60.5) (7,8)",
    "(12, 30) -> (50, 60.5) -> (7, 8)",
    "from (12, 30) to (50, 60.5) to (7, 8)",
    "[12, 30, 50, 60.5, 7, 8]",
    '```json\n[{"point_2d": [12, 30], "label": "cup 3"}, {"point_2d": [50, 60.5], "label": "1, 2"}, '
    '{"point_2d": [7, 8], "label": "(5, 6)"}]\n```',
    '[{"x": 12, "y": 30}, {"x": 50, "y": 60.5}, {"y": 8, "x": 7}]',
    "1. (12, 30)\n2. (50, 60.5)\n3. (7, 8)",
    '<point x="12" y="30" alt="a 5"></point><point x="50" y="60.5"/><point x="7" y="8"/>',
    "<points>(12, 30), (50, 60.5), (7, 8)</points>",
    "<think>(1, 2)</think><answer>[[12, 30], [50, 60.5], [7, 8]]</answer>",
    "\uff0812\uff0c30\uff09\u3001\uff0850\uff0c60.5\uff09\u3001\uff087\uff0c8\uff09",
    "The path is [12, 30], then [50, 60.5], and ends at [7, 8].",
    '[["12", "30"], ["50", "60.5"], ["7", "8"]]',
]


@pytest.mark.parametrize("text", PATHS)
def test_points_and_paths_are_read_in_every_form(text):
    assert parse_points(text) == THREE
    assert parse_trajectory(text) == THREE


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("(12, 30)", [(12, 30)]),
        ("12, 30", [(12, 30)]),
        ("[[12, 30]]", [(12, 30)]),
        ("x=12, y=30", [(12, 30)]),
        ("[(1, 2), (3, 4)]", [(1, 2), (3, 4)]),
        ("[[1, 2], [3, 4], [5, 6], [7, 8]]", [(1, 2), (3, 4), (5, 6), (7, 8)]),
        ("[1, 2, 3, 4]", [(2, 3)]),  # a box stands for its centre
        ("x1: 1 y1: 2 x2: 3 y2: 4", [(2, 3)]),
        ("(1, 2) with width 2 and height 4", [(2, 4)]),
        ("[[1, 2], [1, 2]]", [(1, 2), (1, 2)]),
        ("[[-1, 2.5]]", [(-1, 2.5)]),
        ("somewhere between 1, 2 and there", []),
        ("[1, 2, 3]", []),
        ("[1, 2, 3, 4, 5]", []),
        ("[[1, 2, 3], [4, 5, 6]]", []),
        ("3 cups, 2024-05-12, v1.2, 10:30", []),
        ('{"label": "(3, 4)"}', []),
        ("<ref>(3, 4)</ref>", []),
        ("[]", []),
        ("<think>(1, 2)</think><answer></answer>", []),
        ("<answer>(1, 2)</answer><answer>(3, 4)</answer>", [(1, 2)]),
    ],
)
def test_points_by_hand(text, points):
    assert parse_points(text) == points


def test_a_path_has_two_points_or_more_and_no_named_box():
    assert parse_trajectory("(1, 2)") == []
    assert parse_trajectory("[1, 2, 3, 4]") == [(1, 2), (3, 4)]
    assert parse_trajectory("x1: 1 y1: 2 x2: 3 y2: 4") == []


DETECTIONS = [
    '[{"bbox_2d": [1, 2, 30, 40], "label": "cup 5, 6"}, {"bbox_2d": [5, 6, 7, 8], "label": "a (1, 2, 3, 4) b"}]',
    '```json\n[{"label": "cup 5, 6", "bbox_2d": [1, 2, 30, 40]}, {"label": "a (1, 2, 3, 4) b", "box": [5, 6, 7, 8]}]',
    "[{'bbox': [1, 2, 30, 40], 'category': 'cup 5, 6'}, {'bbox': [5, 6, 7, 8], 'category': 'a (1, 2, 3, 4) b'}]",
    '{"name": "cup 5, 6", "bbox": {"x1": 1, "y1": 2, "x2": 30, "y2": 40}}\n'
    '{"bbox": {"xmin": 5, "ymin": 6, "xmax": 7, "ymax": 8}, "name": "a (1, 2, 3, 4) b"}',
    "<ref>cup 5, 6</ref><box>(1,2),(30,40)</box><ref>a (1, 2, 3, 4) b</ref><box>[[5,6,7,8]]</box>",
    "<|object_ref_start|>cup 5, 6<|object_ref_end|><|box_start|>(1,2),(30,40)<|box_end|>"
    "<|object_ref_start|>a (1, 2, 3, 4) b<|object_ref_end|><|box_start|>(5,6),(7,8)<|box_end|>",
    '<think>{"bbox_2d": [9, 9, 10, 10], "label": "x"}</think><answer>[{"bbox_2d": [1, 2, 30, 40], "label": "cup 5, '
    '6"}, {"bbox_2d": [5, 6, 7, 8], "label": "a (1, 2, 3, 4) b"}]</answer>',
    '[{"bbox_2d": [1, 2, 30, 40], "label": "cup 5, 6"}, {"bbox_2d": [5, 6, 7, 8], "label": "a (1, 2, 3, 4) b',
]


@pytest.mark.parametrize("text", DETECTIONS)
def test_detections_are_read_in_every_form(text):
    assert parse_detections(text) == [
        Detection((1, 2, 30, 40), "cup 5, 6"),
        Detection((5, 6, 7, 8), "a (1, 2, 3, 4) b"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", []),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", [((1, 2, 3, 4), ""), ((5, 6, 7, 8), "")]),
        ('[{"label": "a"}, {"bbox_2d": [1, 2, 3, 4]}]', [((1, 2, 3, 4), "")]),
        ('[{"bbox_2d": [1, 2, 3, 4]}, {"label": "a"}]', [((1, 2, 3, 4), "")]),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"bbox_2d": [1, 2, 3, 4], "label": "b"}', None),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "say \\"hi\\" {x} \\u00e9"}', [((1, 2, 3, 4), 'say "hi" {x} \u00e9')]),
        ("{'bbox_2d': [1, 2, 3, 4], 'label': 'the dog's bowl'}", [((1, 2, 3, 4), "the dog's bowl")]),
        (
            "<ref>cups</ref><box>[[1, 2, 3, 4], [5, 6, 7, 8]]</box>",
            [((1, 2, 3, 4), "cups"), ((5, 6, 7, 8), "cups")],
        ),
        ('[{"bbox_2d": [1, 2, 3], "label": "a"}, {"bbox_2d": [5, 6, 7, 8], "label": "b"}]', [((5, 6, 7, 8), "b")]),
        ('[{"bbox_2d": null, "label": "a"}]', []),
    ],
)
def test_detections_by_hand(text, found):
    if found is None:
        found = [((1, 2, 3, 4), "a"), ((1, 2, 3, 4), "b")]
    assert parse_detections(text) == [Detection(*one) for one in found]


def test_a_label_is_no_box():
    assert parse_box('{"label": "[1, 2, 3, 4]", "bbox_2d": [5, 6, 7, 8]}') == (5, 6, 7, 8)
    assert parse_box('{"label": "[1, 2, 3, 4]"}') is None


# ---- conversion ----


def scale(space, original, resized):
    """Original pixels per model unit, along x and y."""
    units = {"resized_pixels": resized, "thousand": (1000, 1000), "unit": (1, 1)}[space]
    return original[0] / units[0], original[1] / units[1]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("text", PATHS)
def test_points_are_converted_by_each_axis_scale(space, text):
    original, resized = (613, 417), (616, 420)
    x, y = scale(space, original, resized)
    back = to_original(text, space, original, resized)
    for point, before in zip(parse_points(back), THREE, strict=True):
        assert point == pytest.approx((before[0] * x, before[1] * y), abs=0.006)
    assert [label.text for label in find_labels(back)] == [label.text for label in find_labels(text)]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("text", DETECTIONS)
def test_boxes_are_converted_and_digits_of_labels_are_not(space, text):
    original, resized = (613, 417), (616, 420)
    x, y = scale(space, original, resized)
    for before, after in zip(
        parse_detections(text), parse_detections(to_original(text, space, original, resized)), strict=True
    ):
        assert after.label == before.label
        expected = [side * factor for side, factor in zip(before.box_xyxy, (x, y) * 2, strict=True)]
        assert after.box_xyxy == pytest.approx(expected, abs=0.006)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=2, max_size=9), st.sampled_from(SPACES))
def test_a_path_survives_the_way_to_the_model_and_back(path, space):
    sizes = (400, 300), (392, 308)
    there = to_model(json.dumps([list(point) for point in path]), space, *sizes)
    back = parse_trajectory(to_original(there, space, *sizes))
    for point, other in zip(path, back, strict=True):
        assert other == pytest.approx(point, abs=0.53)  # half a unit of the model, and rounding to hundredths


labels = st.text(st.sampled_from("0123456789.,:;()[]{} abcpoint'\"\\/-_é像\uff12\u201d"), max_size=20)
boxes = st.tuples(*[st.integers(0, 400)] * 4)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(boxes, labels), max_size=4), st.sampled_from(SPACES))
def test_any_label_survives_in_json(entries, space):
    text = json.dumps([{"bbox_2d": list(box), "label": label} for box, label in entries], ensure_ascii=False)
    sizes = (400, 300), (392, 308)
    back = parse_detections(to_original(to_model(text, space, *sizes), space, *sizes))
    assert [one.label for one in back] == [label.strip() for _, label in entries]
    for (box, _), one in zip(entries, back, strict=True):
        assert one.box_xyxy == pytest.approx(box, abs=0.53)


alphabet = st.sampled_from("0123456789.,-+ ()[]{}<>/:=\"'xy_pointlabelbox2drefanswerthink\\|\n")


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=100), st.text(alphabet, max_size=120)))
def test_any_text_is_read_without_raising(text):
    for x, y in [*parse_points(text), *parse_trajectory(text)]:
        assert abs(x) < 1e16 and abs(y) < 1e16
    for box, label in parse_detections(text):
        assert len(box) == 4 and isinstance(label, str)


@pytest.mark.slow
def test_time_grows_with_the_length_of_the_text_only():
    program = """
import time
from vlm_grpo.scoring.parsing import parse_detections, parse_points, parse_trajectory
kinds = ['"label": "', '"label": "a" ', '{"label"', "'label':'", "<ref>", "<ref>1</ref>", "{", "}", '"', '"name":"x"}',
         "[1,2,3,4],", "(1,2),", "1,", '{"bbox_2d":[1,2,3,4],"label":"a"},', "<|ref|>(1,2)",
         "'", '"1" ', "[1,2,3,4,5,6]"]
for kind in kinds:
    for parse in (parse_points, parse_trajectory, parse_detections):
        start = time.process_time()
        parse("<answer>" + kind * (100_000 // len(kind)))
        assert time.process_time() - start < 6, (kind, parse)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
