"""Reads from an option's annotation what it accepts: its type and, for numbers, a range.

An option of whole numbers from 1, with the default 4:

    num_answers: Annotated[int, Range(at_least=1)] = 4
"""

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vlm_grpo.common.errors import UserError


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts. No range contains NaN.

    >>> str(Range(at_least=1)), str(Range(above=0, at_most=1)), str(Range(at_least=0, below=math.inf))
    ('at least 1', 'above 0 and at most 1', 'at least 0 and finite')
    >>> math.inf in Range(at_least=0, below=math.inf)
    False
    """

    at_least: float = -math.inf
    above: float | None = None
    at_most: float = math.inf
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        is_above = self.above is None or value > self.above
        is_below = self.below is None or value < self.below
        return self.at_least <= value <= self.at_most and is_above and is_below

    def __str__(self) -> str:
        if -math.inf < self.at_least and self.at_most < math.inf:
            return f"from {self.at_least} to {self.at_most}"
        parts = [f"at least {self.at_least}"] if self.at_least > -math.inf else []
        parts += [] if self.above is None else [f"above {self.above}"]
        parts += [f"at most {self.at_most}"] if self.at_most < math.inf else []
        parts += [] if self.below is None else ["finite" if self.below == math.inf else f"below {self.below}"]
        return " and ".join(parts)


def hints_of(config_type: type) -> dict[str, Any]:
    """The type of each option, with its range if it has one."""
    return get_type_hints(config_type, include_extras=True)


def range_of(hint: Any) -> Range | None:
    """The range in an option's annotation; None if it has none."""
    found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Range)]
    return found[0] if found else None


def check_ranges(config: Any, where: Mapping[str, str] | None = None) -> None:
    """Raise UserError for the first option of this configuration whose value is outside its range.

    `where` maps options to the places where they were given; the message names the place.

    >>> @dataclass
    ... class Sampling:
    ...     num_answers: Annotated[int, Range(at_least=1)] = 4
    >>> check_ranges(Sampling(num_answers=0))
    Traceback (most recent call last):
    ...
    vlm_grpo.common.errors.UserError: num_answers=0: must be at least 1
    """
    for name, hint in hints_of(type(config)).items():
        accepted, value = range_of(hint), getattr(config, name)
        if accepted is None or value is None or value in accepted:
            continue
        null = " or null" if type(None) in members_of(hint) else ""
        place = f" ({where[name]})" if where and name in where else ""
        raise UserError(f"{name}={value}: must be {accepted}{null}{place}")


def members_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: the types of a union, the values of a Literal, or the one type."""
    origin = get_origin(hint)
    if origin is Annotated:
        return members_of(get_args(hint)[0])
    if origin is Literal:
        return get_args(hint)
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in members_of(part))
    return (hint,)


def is_mapping(hint: Any) -> bool:
    """Whether the option is a mapping, whose entries may be given one by one: `task_args.limit=9`."""
    return any((get_origin(member) or member) is dict for member in members_of(hint))


def accepted_words(hint: Any) -> str:
    """A phrase that says what an annotation accepts.

    >>> accepted_words(int | None), accepted_words(Literal["group", "none"])
    ('an integer or null', 'one of group, none')
    >>> accepted_words(Annotated[int | None, Range(at_least=1)]), accepted_words(Annotated[float, Range(above=0)])
    ('an integer of at least 1 or null', 'a number above 0')
    """
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    words |= {type(None): "null", dict: "a mapping", list: "a list", tuple: "a list"}
    if accepted := range_of(hint):
        ranged = f" of {accepted}" if str(accepted).startswith("at ") else f" {accepted}"
        words |= {int: words[int] + ranged, float: words[float] + ranged}
    kinds = [m for m in members_of(hint) if isinstance(m, type) or get_origin(m) or m is Any]
    values = [m for m in members_of(hint) if m not in kinds]
    said = [f"one of {', '.join(map(str, values))}"] if values else []
    for member in kinds:
        said.append("any value" if member is Any else words.get(get_origin(member) or member, str(member)))
    return " or ".join(said)
