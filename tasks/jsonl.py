"""Any questions with images and answers, in files of the common forms, scored by a reward part of your choice.

| form | keys of a row |
|---|---|
| question and answer | `question` or `problem` or `query`; `answer` or `solution` or `response` |
| conversations (VLM-R1, LLaVA) | `conversations` of `from`/`value`; `accu_reward_method` names the reward |
| messages (ms-swift) | `messages` of `role`/`content`; `solution`, or the assistant's last words |
| verl | `prompt` of `role`/`content`; `reward_model.ground_truth`; `data_source` |

Each with `image` or `images` (a path, bytes, or a list of them; none for text), and where they are known `id` and
`options` or `choices`. Files are .jsonl, .json (an array), .parquet, or a .yaml manifest of several of them. The form
is found by the keys of a file's first row, and all of its rows must have it.
"""

import ast
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks._formats import ACCEPTED, SUFFIXES, Part, Row, RowImages, form_of, open_parts, read_row
from tasks._rows import check_limit
from tasks._scenes import check_seed
from vlm_grpo.errors import UserError
from vlm_grpo.mathematics import chosen_option, load_math_verify, math_equal, option_letters
from vlm_grpo.parsing import parse_detections, parse_points, parse_trajectory
from vlm_grpo.quantities import extract_number, number_equal
from vlm_grpo.scoring import (
    box_iou,
    exact_match,
    extract_answer,
    parse_box,
    relaxed_accuracy,
    strict_anls,
    vqa_reward,
)
from vlm_grpo.shapes import detection_score, frechet_distance, match_boxes
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter


class Target(NamedTuple):
    """What an answer is compared with; `options` are those of a multiple choice."""

    answer: Any
    options: tuple[str, ...]
    reward: str


@dataclass(frozen=True)
class RewardPart:
    """A reward by its name: `score` from 0 to 1, `read` brings a row's answer into the form that it needs."""

    about: str
    score: Callable[[str, Target], float]
    read: Callable[[Any], Any]
    reference: Callable[[Target], str]
    coordinates: bool = False
    may_hang: bool = False


def _texts(answer: Any) -> list[str]:
    """The references of a row: text, a number or a list of them; empty ones, which silence would earn, are left out."""
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
    """A text, or a number as people write it: a column of floats has 3.0 for 3."""
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


def read_options(options: Any) -> tuple[str, ...]:
    """The texts of a row's options: of a list, also one that is written as text, or of an object by letters.

    >>> read_options(["red", 2.0]), read_options("['red', 'blue']"), read_options({"A": "red", "B": "blue"})
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
    """Raises ValueError for an answer that is not exactly one option."""
    chosen = chosen_option(answer, options or option_letters(26))
    if chosen is None and options:
        raise ValueError(f"is none of the options {list(options)}")
    if chosen is None:
        raise ValueError('is no letter, and the row has no options. Give them: "options": ["red", "yellow", …]')
    same = [index for index, option in enumerate(options) if option.strip() == answer]
    if same and same != [chosen]:
        letters = ", ".join(f"({option_letters(26)[index]})" for index in sorted({*same, chosen}))
        raise ValueError(f"may be any of {letters}, of the options {list(options)}. Give its letter in round brackets")


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
TIMEOUT_S = 10.0


class Jsonl(TaskAdapter):
    """Questions of your own; the reward is the part that `reward` names, from 0 to 1.

    `data` is a folder with {split}.jsonl (or .json, .parquet, .yaml), or one file. `held_out` is the share of a file's
    rows that are the split val, chosen by their ids (their places, where they have none); the others are train. Without
    it there is no val: all rows are train, and also all, for evaluation. `data_root` is the folder that image paths
    start from; where it is not given they start at the manifest's, or where the rows' file lies. Without `reward`, rows
    that name theirs (VLM-R1's accu_reward_method, verl's data_source) are scored so. `question` is a text with
    {question} in it that is put around the questions, `limit` the most samples of a split, `seed` chooses the rows of a
    manifest's random sample. Answers with boxes or points are in pixels of the row's one image.
    """

    def __init__(
        self,
        data: str | None = None,
        reward: str | None = None,
        data_root: str | None = None,
        question: str = "{question}",
        limit: int | None = None,
        seed: int = 0,
        held_out: float = 0.0,
    ):
        if data is None:
            raise UserError(f"task jsonl has no data. Give task_args.data: a file or folder. Rows are {ACCEPTED}.")
        if reward is not None and reward not in REWARDS:
            raise UserError(f"task_args.reward is {reward!r}; accepted: {', '.join(REWARDS)}")
        if "{question}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{question}}")
        if data_root is not None and not Path(data_root).is_dir():
            raise UserError(f"task_args.data_root is {data_root!r}, which is no folder")
        check_limit(limit)
        check_seed(seed)
        if isinstance(held_out, bool) or not isinstance(held_out, int | float) or not 0 <= held_out < 1:
            raise UserError(
                f"task_args.held_out is {held_out!r}; accepted: a share of a file's rows, from 0 to below 1"
            )
        if held_out and Path(data).is_dir():
            raise UserError(
                f"task_args.held_out={held_out} divides one file; task_args.data is the folder {data!r}, whose files "
                "are its splits."
            )
        self.held_out = held_out
        self.data, self.reward_name, self.question, self.limit, self.seed = Path(data), reward, question, limit, seed
        self.data_root = None if data_root is None else Path(data_root)
        forms, rewards = self._look_at(self._any_file())
        kinds = {REWARDS[name].coordinates for name in rewards}
        if len(kinds) > 1:
            raise UserError(f"{data}: the rewards {', '.join(rewards)} mix words and positions; give task_args.reward")
        self._has_coordinates = kinds == {True}
        self._may_hang = reward is None or REWARDS[reward].may_hang
        about = "; ".join(f"{name}: {REWARDS[name].about}" for name in rewards)
        self.metric_note = f"reward: {about}; form of the rows: {', '.join(forms)}; data: {data}"

    @property
    def coordinates(self) -> bool:  # type: ignore[override]  of the rewards, not of the class
        return self._has_coordinates

    @property
    def reward_timeout_s(self) -> float | None:  # type: ignore[override]
        return TIMEOUT_S if self._may_hang else None

    # ---- rows ----

    def _any_file(self) -> Path:
        """A file whose first row shows the form."""
        if self.data.is_dir():
            files = sorted(path for path in self.data.iterdir() if path.suffix in SUFFIXES)
            if not files:
                raise UserError(f"task_args.data is {str(self.data)!r}, which holds no file in {', '.join(SUFFIXES)}.")
            return next((path for path in files if path.stem == "train"), files[0])
        if not self.data.is_file() or self.data.suffix not in SUFFIXES:
            raise UserError(
                f"task_args.data is {str(self.data)!r}, which is no folder and no file in {', '.join(SUFFIXES)}."
            )
        return self.data

    def _look_at(self, path: Path) -> tuple[list[str], list[str]]:
        """The forms of the files that `path` names, and the rewards of their first rows."""
        forms, rewards = [], []
        for part in open_parts(path, self.data_root, self.seed):
            if len(part.indices) == 0:
                continue
            form = self._form(part)
            target = self._target(self._row(part, form, part.indices[0]), part.table.where(part.indices[0]))
            forms.append(form)
            rewards.append(target.reward)
        if not forms:
            raise UserError(f"{path}: it holds no rows.")
        return list(dict.fromkeys(forms)), list(dict.fromkeys(rewards))

    def _form(self, part: Part) -> str:
        first = part.table.row(part.indices[0])
        form = form_of(first)
        if form is None:
            where = part.table.where(part.indices[0])
            raise UserError(f"{where}: no known form of row; its keys are {', '.join(first)}. Accepted: {ACCEPTED}.")
        return form

    def _row(self, part: Part, form: str, index: int) -> Row:
        return read_row(part.table.row(index), form, part.table.where(index))

    def _target(self, row: Row, where: str) -> Target:
        name = self.reward_name or _own_reward(row.more)
        if name is None:
            raise UserError(
                f"{where}: the row does not say how it is scored; give task_args.reward: {', '.join(REWARDS)}"
            )
        try:
            answer = REWARDS[name].read(row.answer)
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: the answer {row.answer!r} does not suit reward={name}: {error}.") from error
        if name != "multiple_choice":
            return Target(answer, (), name)
        given = row.more["options"]
        try:
            options = () if given is None else read_options(given)
        except ValueError as error:
            raise UserError(f"{where}: the options are {given!r}; {error}.") from error
        try:
            _check_choice(answer[0], options)
        except ValueError as error:
            raise UserError(f"{where}: the answer {answer[0]!r} {error}.") from error
        return Target(answer, options, name)

    def samples(self, split: str) -> Sequence[Sample]:
        ids: list[str] = []
        keys: list[str] = []  # the same whatever the split
        places: list[tuple[Part, str, int]] = []
        parts = open_parts(self._file(split), self.data_root, self.seed)
        for number, part in enumerate(parts):
            if not len(part.indices):
                continue
            form = self._form(part)
            own = part.table.ids()
            stem = part.table.path.stem
            for index in part.indices:
                prefix = f"{stem}-{number}-" if len(parts) > 1 else "" if own[index] else f"{split}-"
                ids.append(f"{prefix}{own[index] or index}")
                keys.append(f"{stem if len(parts) > 1 else ''}-{own[index] or index}")
                places.append((part, form, index))
        if self.held_out:
            chosen = [at for at, held in enumerate(_held_out(keys, self.held_out)) if held == (split == "val")]
            ids, places = [ids[at] for at in chosen], [places[at] for at in chosen]
        ids = ids[: self.limit]

        def make(at: int) -> Sample:
            part, form, index = places[at]
            where = part.table.where(index)
            row = self._row(part, form, index)
            target = self._target(row, where)
            if REWARDS[target.reward].coordinates != self._has_coordinates:
                kind = "positions" if self._has_coordinates else "words"
                raise UserError(
                    f"{where}: its reward is {target.reward}, and the first row's is of {kind}; give task_args.reward, "
                    "or files of their own."
                )
            shown = "" if all(option in row.question for option in target.options) else _listed(target.options)
            question = self.question.replace("{question}", row.question + shown)
            return Sample(ids[at], RowImages(row.images, part.table.root, where), question, target)

        return LazySamples(ids, make)

    def _file(self, split: str) -> Path:
        if not self.data.is_dir():
            self._check_split_of_file(split)
            return self.data
        found = [path for path in (self.data / f"{split}{suffix}" for suffix in SUFFIXES) if path.is_file()]
        if not found:
            there = ", ".join(sorted({path.stem for path in self.data.iterdir() if path.suffix in SUFFIXES}))
            raise UserError(f"{self.data} has no file {split}.jsonl; splits there: {there}.")
        return found[0]

    def _check_split_of_file(self, split: str) -> None:
        if split in (("train", "val") if self.held_out else ("train", "all")):
            return
        advice = "give a folder with a file for each split as task_args.data"
        if split == "val":
            raise UserError(
                f"{self.data} is one file, and none of its rows are held out as val. Give task_args.held_out=0.1 for a "
                f"tenth of them, or {advice}. To train without held-out rows give an empty eval_split=; to evaluate "
                "all rows, split=all."
            )
        there = "train and val" if self.held_out else "train, all, and with task_args.held_out val"
        raise UserError(f"{self.data} is one file, which has no split {split!r}; its splits: {there}. Or {advice}.")

    # ---- scores ----

    def reward(self, sample: Sample, answer: str) -> Reward:
        target: Target = sample.target
        value = REWARDS[target.reward].score(answer, target)
        return Reward(value, {target.reward: value})

    def prepare_reward(self) -> None:
        load_math_verify()

    def overdue_reward(self, sample: Sample) -> Reward:
        return Reward(0.0, {sample.target.reward: 0.0})

    def reference_answer(self, sample: Sample) -> str:
        return REWARDS[sample.target.reward].reference(sample.target)


def _own_reward(more: Mapping[str, Any]) -> str | None:
    return OF_METHOD.get(str(more.get("reward"))) or OF_SOURCE.get(str(more.get("source")))


def _held_out(keys: Sequence[str], share: float) -> list[bool]:
    """Which rows are held out: `share` of them, rounded up, those of the smallest digests; rows of one key together."""
    digests = [hashlib.blake2b(key.encode(errors="backslashreplace"), digest_size=8).digest() for key in keys]
    last = sorted(digests)[math.ceil(share * len(keys)) - 1] if keys else b""
    return [digest <= last for digest in digests]


def _listed(options: Sequence[str]) -> str:
    return "".join(f"\n({letter}) {option}" for letter, option in zip(option_letters(26), options, strict=False))
