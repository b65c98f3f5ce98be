"""Parsers of points, trajectories and detections in a model's answer. `parse_box` in answers.py reads a single box.

All parsers build on `find_coordinates`, so they read exactly the numbers that coordinates.py converts. They read only
the answer that `answer_span` finds. A malformed answer gives an empty list and never raises.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from vlm_grpo.scoring.answers import answer_span
from vlm_grpo.scoring.located import Box, Label, Located, find_coordinates, find_labels

Point = tuple[float, float]


class Detection(NamedTuple):
    """A box (x1, y1, x2, y2) and its label; "" if it has none."""

    box_xyxy: Box
    label: str


def parse_points(text: str) -> list[Point]:
    """The points of the answer in `text`, in its order, with their numbers as they are written; empty if none.

    | accepted | examples |
    |---|---|
    | pairs in any brackets, quotes, fence or tag | `[(1, 2), (3, 4)]`, `[[1, 2]]`, `<point>1, 2</point>` |
    | a pair alone | `1, 2`, `1 2` |
    | a JSON list of objects | `[{"point_2d": [1, 2], "label": "cup 3"}]`, `{"x": 1, "y": 2}` |
    | named coordinates | `x=1, y=2`, `<point x="1" y="2" alt="…">` |
    | six or more numbers in brackets, two by two | `[1, 2, 3, 4, 5, 6]` |
    | a box stands for its centre | `[1, 2, 3, 4]`, `x1: 1 y1: 2 x2: 3 y2: 4` |
    | signs, decimals, units, full-width digits, … | as parse_box takes them |

    Not a point: a pair in running text without brackets ("between 1, 2"), digits in labels, dates, times, versions.
    """
    points: list[Point] = []
    for located in _in_answer(text):
        if located.xyxy is None or located.written == "pairs":
            points += located.pairs
        else:
            x1, y1, x2, y2 = located.xyxy
            points.append(((x1 + x2) / 2, (y1 + y2) / 2))
    return points


def parse_trajectory(text: str) -> list[Point]:
    """The points of the path in the answer, in its order; empty if there are fewer than two.

    It accepts the spellings of parse_points with two exceptions: a box with named sides is ignored, and four numbers in
    a row are two points. All points of the answer make one path, so several paths are joined.
    """
    points = [point for located in _in_answer(text) if located.written != "sides" for point in located.pairs]
    return points if len(points) > 1 else []


def parse_detections(text: str) -> list[Detection]:
    """The boxes of the answer in `text` with their labels, in its order; empty if there are none.

    | accepted | examples |
    |---|---|
    | a JSON list of objects, in a fence or not, complete or cut | `[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]` |
    | keys in any order, a box in any form of parse_box | `{"label": "cup", "bbox": {"x1": 1, "y1": 2, …}}` |
    | the label as label, category, category_name, class, class_name, name, object | `{"box": …, "category": "cup"}` |
    | Python's quotes | `{'bbox_2d': [1, 2, 3, 4], 'label': 'cup'}` |
    | a reference before its boxes, for all of them | `<ref>cup</ref><box>(1,2),(3,4)</box>`, object_ref_start |
    | boxes alone, label "" | `[[1, 2, 3, 4], [5, 6, 7, 8]]` |

    A label belongs to the box in the same braces. Digits in labels are text.
    """
    found: list[Detection] = []
    tagged = ""
    box: Box | None = None
    label: str | None = None

    def close() -> None:
        nonlocal box, label
        if box is not None:
            found.append(Detection(box, tagged if label is None else label))
        box, label = None, None

    for event in _events(text):
        match event:
            case Label(tagged=True):
                close()
                tagged = _plain(event.text)
            case Label():
                if label is not None:
                    close()
                label = _plain(event.text)
            case Located():
                if box is not None:
                    close()
                box = event.xyxy
            case "{":
                if box is not None:
                    close()
            case "}":
                if box is None or label is not None:
                    close()
    close()
    return found


def _in_answer(text: str) -> Iterator[Located]:
    start, end = answer_span(text)
    for located in find_coordinates(text):
        if start <= located.coordinates[0].start and located.coordinates[-1].end <= end:
            yield located


def _events(text: str) -> list[Located | Label | str]:
    """Boxes, labels and braces of the answer, in its order. A box's place is the end of its last number."""
    start, end = answer_span(text)
    boxes = [located for located in _in_answer(text) if located.xyxy is not None]
    labels = [label for label in find_labels(text) if start <= label.start and label.end <= end]
    events: list[tuple[int, Located | Label | str]] = [(box.coordinates[-1].end, box) for box in boxes]
    events += [(label.start, label) for label in labels]
    held = iter([*labels, None])
    current = next(held)
    for at in range(start, end):
        while current is not None and current.end <= at:
            current = next(held)
        if text[at] in "{}" and not (current is not None and current.start <= at):
            events.append((at, text[at]))
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def _plain(label: str) -> str:
    """The label with JSON escapes decoded and surrounding white space removed."""
    with contextlib.suppress(ValueError):
        return json.loads(f'"{label}"').strip()
    return label.strip()
