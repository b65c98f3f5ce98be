"""The rewards that a task of your own rows may choose by name, and the form that each needs a row's answer in."""

import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks._formats import Row
from vlm_grpo.scoring import box_iou, exact_match, extract_answer, parse_box, relaxed_accuracy, strict_anls, vqa_reward
from vlm_grpo.scoring.mathematics import chosen_option, math_equal, option_letters
from vlm_grpo.scoring.parsing import parse_detections, parse_points, parse_trajectory
from vlm_grpo.scoring.quantities import extract_number, number_equal
from vlm_grpo.scoring.shapes import detection_score, frechet_distance, match_boxes


class Target(NamedTuple):
    """The reference that an answer is compared with; `options` are the options of a multiple choice."""

    answer: Any
    options: tuple[str, ...]
    reward: str


@dataclass(frozen=True)
class RewardPart:
    """A named reward. `score` gives it, from 0 to 1; `read` converts a row's answer into the form for `score`."""

    about: str
    score: Callable[[str, Target], float]
    read: Callable[[Any], Any]
    reference: Callable[[Target], str]
    coordinates: bool = False
    may_hang: bool = False


def _texts(answer: Any) -> list[str]:
    """The references of a row, given as a text, a number or a list. Empty ones are dropped, as silence would match."""
    answers = answer if isinstance(answer, list) else [answer]
    if not all(map(_is_written, answers)):
        raise ValueError("it must be text, a number or a list of them")
    texts = [extract_answer(_written(one)) for one in answers]
    if not any(texts):
        raise ValueError("it is empty")
    return [text for text in texts if text]


def _is_written(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _written(value: str | int | float) -> str:
    """The text of a value. A whole number has no decimals, since a column of floats stores 3 as 3.0."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _with_number(answer: Any) -> list[str]:
    texts = _texts(answer)
    if len(texts) != 1 or extract_number(texts[0]) is None:
        raise ValueError("it must hold one number")
    return texts


def _box(answer: Any) -> tuple[float, ...]:
    box = parse_box(answer if isinstance(answer, str) else json.dumps(answer))
    if box is None or not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError("it must be a box: left, top, right, bottom in pixels")
    return box


def _path(answer: Any) -> list[tuple[float, float]]:
    points = parse_trajectory(answer if isinstance(answer, str) else json.dumps(answer))
    if not points:
        raise ValueError("it must be two points or more: [[x, y], …] in pixels")
    return points


def _things(answer: Any) -> list[tuple[tuple[float, ...], str]]:
    things = parse_detections(answer if isinstance(answer, str) else json.dumps(answer))
    if not things or not all(x1 < x2 and y1 < y2 for (x1, y1, x2, y2), _ in things):
        raise ValueError('it must be a list of {"bbox_2d": [left, top, right, bottom], "label": name}')
    return [(thing.box_xyxy, thing.label) for thing in things]


def _choice(answer: Any) -> list[str]:
    [choice] = answer if isinstance(answer, list) and len(answer) == 1 else [answer]
    if not isinstance(choice, str):
        raise ValueError(
            "it must be one text: an option's letter, or the text of an option (a number may count from 0, or from 1, "
            "or be a text)"
        )
    return _texts(choice)


def _options(options: Any) -> tuple[str, ...]:
    """The texts of a row's options, given as a list, as the text of a list, or as an object with letters as keys.

    >>> _options(["red", 2.0]), _options("['red', 'blue']"), _options({"A": "red", "B": "blue"})
    (('red', '2'), ('red', 'blue'), ('red', 'blue'))
    """
    given = options
    if isinstance(given, str):
        try:
            given = ast.literal_eval(given.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            given = None
    if isinstance(given, Mapping):
        given = {letter: text for letter, text in given.items() if text is not None}  # columns of longer rows
        letters = option_letters(len(given))
        given = [given[letter] for letter in letters] if set(given) == set(letters) else None
    if not isinstance(given, list) or len(given) > 26 or not all(map(_is_written, given)):
        raise ValueError('they must be a list of at most 26 texts or numbers, or {"A": text, "B": text, …}')
    return tuple(map(_written, given))


def _check_choice(answer: str, options: Sequence[str]) -> None:
    """Raise ValueError unless the answer is exactly one of the options."""
    chosen = chosen_option(answer, options or option_letters(26))
    if chosen is None and options:
        raise ValueError(f"the answer {answer!r} is none of the options {list(options)}")
    if chosen is None:
        raise ValueError(
            f"the answer {answer!r} is no letter, and the row has no options. Give them: "
            '"options": ["red", "yellow", …]'
        )
    same = [index for index, option in enumerate(options) if option.strip() == answer]
    if same and same != [chosen]:
        letters = ", ".join(f"({option_letters(26)[index]})" for index in sorted({*same, chosen}))
        raise ValueError(
            f"the answer {answer!r} may be any of {letters}, of the options {list(options)}. Give its letter in round "
            "brackets"
        )


def _chosen(answer: str, target: Target) -> float:
    options = target.options or option_letters(26)
    wanted = chosen_option(target.answer[0], options)
    return float(wanted is not None and chosen_option(answer, options) == wanted)


def _points_in_box(answer: str, target: Target) -> float:
    points = parse_points(answer)
    x1, y1, x2, y2 = target.answer
    return sum(x1 <= x < x2 and y1 <= y < y2 for x, y in points) / len(points) if points else 0.0


def _near_path(answer: str, target: Target) -> float:
    points = parse_trajectory(answer)
    (left, top), (right, bottom) = (tuple(f(axis) for axis in zip(*target.answer, strict=True)) for f in (min, max))
    size = max(right - left, bottom - top, 1.0)
    near = [(min(max(x, -1e6), 1e6), min(max(y, -1e6), 1e6)) for x, y in points]
    return max(0.0, 1 - frechet_distance(near, target.answer) / size) if near else 0.0


def _detected(answer: str, target: Target) -> float:
    found = parse_detections(answer)
    boxes, labels = [one.box_xyxy for one in found], [one.label.strip().casefold() for one in found]
    wanted, names = [box for box, _ in target.answer], [label.strip().casefold() for _, label in target.answer]
    pairs = match_boxes(boxes, labels, wanted, names, threshold=0.5)
    return detection_score([iou for _, _, iou in pairs], len(found), len(wanted))


def _first(target: Target) -> str:
    return target.answer[0]


def _json(target: Target) -> str:
    return json.dumps(target.answer)


def _text(score: Callable[[str, list[str]], float]) -> Callable[[str, Target], float]:
    return lambda answer, target: float(score(extract_answer(answer), target.answer))


REWARDS: dict[str, RewardPart] = {
    "exact_match": RewardPart("equal but for case", _text(exact_match), _texts, _first),
    "vqa_accuracy": RewardPart(
        "VQA's soft accuracy, relative to that of the best of the row's answers",
        _text(vqa_reward),
        _texts,
        lambda target: max(target.answer, key=lambda one: vqa_reward(one, target.answer)),
    ),
    "anls": RewardPart("1 - edit distance / length, 0 below 0.5", _text(strict_anls), _texts, _first),
    "relaxed_accuracy": RewardPart(
        "a number within 5%, or equal",
        _text(lambda answer, wanted: max(relaxed_accuracy(answer, one) for one in wanted)),
        _texts,
        _first,
    ),
    "number": RewardPart(
        "the same number", lambda a, target: float(number_equal(a, target.answer[0])), _with_number, _first
    ),
    "math": RewardPart(
        "mathematically equal",
        lambda answer, target: float(any(math_equal(answer, one) for one in target.answer)),
        _texts,
        _first,
        may_hang=True,
    ),
    "multiple_choice": RewardPart("the right option's letter or text", _chosen, _choice, _first),
    "box_iou": RewardPart(
        "IoU of the first box", lambda a, t: box_iou(parse_box(a) or (0, 0, 0, 0), t.answer), _box, _json, True
    ),
    "points": RewardPart(
        "share of the points in the box",
        _points_in_box,
        _box,
        lambda t: json.dumps([[(t.answer[0] + t.answer[2]) / 2, (t.answer[1] + t.answer[3]) / 2]]),
        True,
    ),
    "trajectory": RewardPart(
        "1 - discrete Fréchet distance / the longer side of the reference", _near_path, _path, _json, True
    ),
    "detections": RewardPart(
        "F1 at IoU 0.5, times the mean IoU",
        _detected,
        _things,
        lambda t: json.dumps([{"bbox_2d": list(box), "label": label} for box, label in t.answer]),
        True,
    ),
}
# What rows say about their own reward, where task_args.reward is not given
OF_METHOD = {"default": "math", "math": "math", "mcq": "multiple_choice", "yes_no": "exact_match", "iou": "box_iou"}
OF_SOURCE = {"openai/gsm8k": "number", "hiyouga/geometry3k": "math"}


def own_reward(row: Row) -> str | None:
    """The name of the reward that a row asks for; None if it names none."""
    return OF_METHOD.get(str(row.more.get("reward"))) or OF_SOURCE.get(str(row.more.get("source")))


def read_target(row: Row, name: str) -> Target:
    """The reference of a row for the reward `name`. Raises ValueError if the row lacks a suitable answer."""
    try:
        answer = REWARDS[name].read(row.answer)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the answer {row.answer!r} does not suit reward={name}: {error}") from error
    if name != "multiple_choice":
        return Target(answer, (), name)
    given = row.more["options"]
    try:
        options = () if given in (None, "") else _options(given)
    except ValueError as error:
        raise ValueError(f"the options are {given!r}; {error}") from error
    _check_choice(answer[0], options)
    return Target(answer, options, name)
