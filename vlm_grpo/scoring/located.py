"""Finds the boxes and points in a text, with the place of each number, so that coordinates.py can convert them.

Only brackets, separators and words decide which numbers make a box, never the size of a number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from vlm_grpo.scoring.spelling import (
    _DIGITS,
    _FILLER,
    _FORMS,
    _GAP,
    _LABEL,
    _LAYOUTS,
    _LIMIT,
    _LOCATION_SIDES,
    _LONGEST_GAP,
    _MOST_FILLER,
    _TOKEN,
    _Link,
    _Part,
    _Token,
)

Box = tuple[float, float, float, float]


class Coordinate(NamedTuple):
    """One number in a text. Characters `start` to `end` spell `value`, a position or a length along `axis`."""

    start: int
    end: int
    value: float
    axis: Literal["x", "y"]


@dataclass(frozen=True)
class Located:
    """A box, or points, found in a text; coordinates stand in the text's order. `xyxy` is None for points.

    `written` tells the spelling. "pairs": pairs of x and y, which may also be read as points. "row": four numbers in a
    row. "sides": named sides, corners or sizes, or location tokens, which can only mean a box.
    """

    coordinates: tuple[Coordinate, ...]
    xyxy: Box | None
    written: Literal["pairs", "row", "sides"] = "pairs"

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The coordinates as (x, y) pairs."""
        twos = zip(self.coordinates[::2], self.coordinates[1::2], strict=True)
        return [(a.value, b.value) if a.axis == "x" else (b.value, a.value) for a, b in twos]


_FORMS |= {0x2080 + digit: str(digit) for digit in range(10)}  # subscripts, as in x₁


_FORMS |= dict(zip(map(ord, "\u2212\u3000\u3001\u2018\u2019\u201c\u201d\u3010\u3011"), '- ,""""[]', strict=True))


class Label(NamedTuple):
    """The name that a text gives to a box or point: characters `start` to `end` of the text."""

    start: int
    end: int
    text: str
    tagged: bool
    """In `<ref>…</ref>` or `<|object_ref_start|>…<|object_ref_end|>`, and not as an entry of a JSON object."""


def find_labels(text: str) -> list[Label]:
    """The labels of a text, in its order.

    A label is the text in ref tags, or the value of "label", "category", "category_name", "class", "class_name", "name"
    or "object" in a JSON object, which may be cut off.
    """
    labels = []
    for match in _LABEL.finditer(text):
        group = next(name for name in ("double", "single", "curly", "tagged") if match[name] is not None)
        start, end = match.span(group)
        labels.append(Label(start, end, text[start:end], group == "tagged"))
    return labels


def _without_labels(text: str) -> str:
    """The text in ASCII forms, with letters in place of its labels. Every character keeps its position."""
    flat, pieces, done = text.translate(_FORMS), [], 0
    for label in find_labels(text):
        pieces += [flat[done : label.start], "z" * (label.end - label.start)]
        done = label.end
    return "".join([*pieces, flat[done:]])


def find_coordinates(text: str) -> list[Located]:
    """All boxes and points of a text, in its order. Numbers in labels are ignored.

    The table in parse_box lists the spellings of boxes. A point is a pair of numbers that is part of no box: in
    brackets or tags, alone in the text, or as a named x and y. Six, eight, ten, … numbers separated by commas and alone
    in brackets are points too.
    """
    reader = _Reader(text)
    found: list[Located] = []
    index = 0
    while index < len(reader.parts):
        count, located = reader.read(index)
        found += [item for item in located if all(abs(number.value) < _LIMIT for number in item.coordinates)]
        index += count
    return found


class _Reader:
    """Splits a text into tokens and finds the parts of boxes and points among them."""

    def __init__(self, text: str):
        self.flat = _without_labels(text)
        self.tokens = [
            _Token(match.lastgroup or "other", *match.span(), match[0]) for match in _TOKEN.finditer(self.flat)
        ]
        self.parts = self._find_parts()

    def _find_parts(self) -> list[_Part]:
        numbers = [index for index, token in enumerate(self.tokens) if token.kind in ("number", "loc")]
        parts: list[_Part] = []
        at = 0
        while at < len(numbers):
            row, separators = [numbers[at]], []
            if self.tokens[numbers[at]].kind == "number":
                while at + len(row) < len(numbers):
                    following = numbers[at + len(row)]
                    separator = self._separator(self.tokens[row[-1]], self.tokens[following])
                    if separator is None:
                        break
                    row.append(following)
                    separators.append(separator)
            part = self._part(row, separators)
            if part is not None:
                parts.append(part)
            at += len(row)
        return parts

    def _separator(self, left: _Token, right: _Token) -> str | None:
        """The separator of two numbers in one row: a sign or a space; None if they do not stand in one row."""
        if right.kind != "number" or not 0 < right.start - left.end <= _LONGEST_GAP:
            return None
        gap = self.flat[left.end : right.start]
        match = _GAP.fullmatch(gap)
        if match is None:
            return None
        return match["separator"].replace(";", ",") or (" " if any(map(str.isspace, gap)) else None)

    def _part(self, row: list[int], separators: list[str]) -> _Part | None:
        numbers = tuple(self.tokens[index] for index in row)
        if numbers[0].kind == "loc":
            digits = re.search(rf"[-+]?{_DIGITS}", numbers[0].text)
            assert digits is not None, numbers[0].text
            start = numbers[0].start + digits.start()
            number = _Token("number", start, start + len(digits[0]), digits[0])
            return _Part("<loc_" if "_" in numbers[0].text else "<loc", row[0], row[0], (number,))
        if len(row) == 4 and separators[0] == separators[2]:
            return _Part("row", row[0], row[-1], numbers)
        before, after = self._next_solid(row[0], -1), self._next_solid(row[-1], +1)
        around = (
            self.tokens[before].kind if before >= 0 else "tag",
            self.tokens[after].kind if after < len(self.tokens) else "tag",
        )
        if len(row) == 2:
            if around == ("open", "close"):
                return _Part("pair", before, after, numbers)
            return _Part("pair" if around == ("tag", "tag") else "bare", row[0], row[-1], numbers)
        if len(row) > 4 and len(row) % 2 == 0 and around == ("open", "close") and set(separators) == {","}:
            return _Part("list", before, after, numbers)
        if len(row) == 1:
            name = self._name_before(row[0])
            return _Part(_side(self.tokens[name].text), name, row[0], numbers) if name is not None else None
        return None

    def _next_solid(self, index: int, step: int) -> int:
        index += step
        while 0 <= index < len(self.tokens) and (
            self.tokens[index].kind == "space" or self.tokens[index].text in "\"'`"
        ):
            index += step
        return index

    def _name_before(self, number: int) -> int | None:
        """Index of the token that names the number, as in `x1: 12`, `"left" = "12"`, `width of 12`; None if none."""
        for index in range(number - 1, max(-1, number - 8), -1):
            token = self.tokens[index]
            if token.kind == "name":
                return index
            if not (token.kind == "space" or token.text in ":=\"'`*" or token.text.lower() in ("is", "of", "at")):
                return None
        return None

    def _link(self, left: _Part, right: _Part) -> _Link | None:
        """The link between two neighbouring parts; None if anything but filler stands between them."""
        if right.first - left.last - 1 > _MOST_FILLER:
            return None
        between = self.tokens[left.last + 1 : right.first]
        kinds = {token.kind for token in between}
        if not kinds <= _FILLER:
            return None
        corner = next((token.text.lower() for token in between if token.kind == "corner"), "")
        return _Link(bool(kinds & {"open", "close"}), "to" in kinds, corner, kinds <= {"space", "mark"})

    def read(self, index: int) -> tuple[int, list[Located]]:
        """The boxes or points that begin with part `index`, preceded by the number of parts that they consist of."""
        form = self.parts[index].form
        if form == "row":
            return 1, [replace(_box(self.parts[index].numbers, ("x1", "y1", "x2", "y2")), written="row")]
        if form == "list":
            numbers = self.parts[index].numbers
            return 1, [_points(numbers, ("x", "y") * (len(numbers) // 2))]
        if form in ("pair", "bare"):
            return self._read_pairs(index)
        if form in _LOCATION_SIDES:
            group = self._linked(index, 4)
            numbers = [part.numbers[0] for part in group if part.form == form]
            return (4, [_box(numbers, _LOCATION_SIDES[form])]) if len(numbers) == 4 else (1, [])
        return self._read_named(index)

    def _linked(self, index: int, most: int) -> list[_Part]:
        """Up to `most` parts from `index` on, each linked to the one before."""
        group = [self.parts[index]]
        for part in self.parts[index + 1 : index + most]:
            if self._link(group[-1], part) is None:
                break
            group.append(part)
        return group

    def _read_named(self, index: int) -> tuple[int, list[Located]]:
        group = self._linked(index, 4)
        sides = tuple(part.form for part in group)
        numbers = [part.numbers[0] for part in group]
        if sides == ("x", "y", "x", "y"):
            return 4, [replace(_box(numbers, ("x1", "y1", "x2", "y2")), written="pairs")]
        if frozenset(sides) in _LAYOUTS:
            return 4, [_box(numbers, sides)]
        if set(sides[:2]) == {"x", "y"}:
            return 2, [_points(numbers[:2], sides[:2])]
        return 1, []

    def _read_pairs(self, index: int) -> tuple[int, list[Located]]:
        chain, links = [self.parts[index]], []
        for at in range(index + 1, len(self.parts)):
            part = self.parts[at]
            link = self._link(chain[-1], part) if part.form in ("pair", "bare") else None
            bare = "bare" in (chain[-1].form, part.form)
            if link is None or link.brackets or (bare and not (link.to or link.corner)):
                break
            chain.append(part)
            links.append(link)
        numbers = [number for part in chain for number in part.numbers]
        if len(chain) == 2:
            # The name of the second corner decides which it is: "bottom right (3, 4), top left (1, 2)".
            x = "x1" if "left" in links[0].corner or "左" in links[0].corner else "x2"
            y = "y1" if re.search("top|upper|上", links[0].corner) else "y2"
            box = _box(numbers, ("x2" if x == "x1" else "x1", "y2" if y == "y1" else "y1", x, y))
            return 2, [box if links[0].corner else replace(box, written="pairs")]
        if len(chain) == 4 and all(part.form == "pair" for part in chain) and all(link.plain for link in links):
            return 4, [replace(_box(numbers, ("x", "y") * 4), written="pairs")]
        if len(chain) == 1:
            group = self._linked(index, 3)
            if {part.form for part in group[1:]} == {"w", "h"}:
                sizes = [part.numbers[0] for part in group[1:]]
                return 3, [_box([*numbers, *sizes], ("x", "y", group[1].form, group[2].form))]
        return len(chain), [_points(part.numbers, ("x", "y")) for part in chain if part.form == "pair"]


def _side(name: str) -> str:
    """The side that a name means: x, y, w, h, cx, cy, or a corner's coordinate from x0 to y2 (min is 1, max is 2)."""
    plain = re.sub(r"[\s_<>-]", "", name.lower())
    words = {"left": "x1", "top": "y1", "right": "x2", "bottom": "y2", "width": "w", "height": "h"}
    if plain in words:
        return words[plain]
    if plain.startswith(("top", "upper", "bottom", "lower", "left", "right")):
        second = "right" in plain if plain[-1] == "x" else "bottom" in plain or "lower" in plain
        return f"{plain[-1]}{2 if second else 1}"
    axis = "x" if "x" in plain.replace("max", "") else "y"
    return f"{axis}1" if "min" in plain else f"{axis}2" if "max" in plain else plain


def _points(numbers: Sequence[_Token], sides: Sequence[str]) -> Located:
    return Located(_coordinates(numbers, sides), None)


def _coordinates(numbers: Sequence[_Token], sides: Sequence[str]) -> tuple[Coordinate, ...]:
    return tuple(
        Coordinate(number.start, number.end, float(number.text), "x" if "x" in side or side == "w" else "y")
        for number, side in zip(numbers, sides, strict=True)
    )


def _box(numbers: Sequence[_Token], sides: Sequence[str]) -> Located:
    """The box with these numbers as its sides; _LAYOUTS lists the sides that may stand together."""
    coordinates = _coordinates(numbers, sides)
    value = {side: coordinate.value for side, coordinate in zip(sides, coordinates, strict=True)}
    if len(sides) == 8:
        xs = [coordinate.value for coordinate in coordinates if coordinate.axis == "x"]
        ys = [coordinate.value for coordinate in coordinates if coordinate.axis == "y"]
        return Located(coordinates, (min(xs), min(ys), max(xs), max(ys)), "sides")
    if "w" in value:
        centred = "cx" in value
        x, y = (value["cx"], value["cy"]) if centred else (_first(value, "x"), _first(value, "y"))
        x, y = (x - value["w"] / 2, y - value["h"] / 2) if centred else (x, y)
        return Located(coordinates, (x, y, x + value["w"], y + value["h"]), "sides")
    if "x0" in value:
        return Located(coordinates, (value["x0"], value["y0"], value["x1"], value["y1"]), "sides")
    return Located(coordinates, (value["x1"], value["y1"], value["x2"], value["y2"]), "sides")


def _first(value: dict[str, float], axis: str) -> float:
    return next(number for side, number in value.items() if side.startswith(axis))
