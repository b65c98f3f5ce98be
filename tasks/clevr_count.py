"""Counting objects in CLEVR's rendered scenes."""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tasks._vqa import QuestionAnswering

_SPELT = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_WORDS = {word: str(number) for number, word in enumerate(_SPELT)}
_NUMBERS = re.compile(
    r"(?<![\w.,])[-+]?[0-9]+(?:\.[0-9]+)?(?![\w]|[.,][0-9])|(?<!\w)(?:" + "|".join(_WORDS) + r")(?!\w)"
)


class ClevrCount(QuestionAnswering):
    """The reward is 1 for the exact number, else 0. The answer may be a sentence, but may contain no other number."""

    headline: ClassVar[str] = "accuracy"
    note: ClassVar[str] = "accuracy: the one number in the answer equals the reference"
    script: ClassVar[str] = "clevr_count"
    template: ClassVar[str] = "{question}\nAnswer with one number."

    def parts(self, answers: Sequence[str], answer: str) -> Mapping[str, float]:
        count = only_number(answer)
        right = count is not None and any(count == float(reference) for reference in answers)
        return {"accuracy": float(right), "parsed": float(count is not None)}


def only_number(text: str) -> float | None:
    """The number in a text, in digits or as a word up to twelve; None if there is none, or if several differ.

    >>> only_number("There are 3."), only_number("Three (3)"), only_number("2 or 3"), only_number("many")
    (3.0, 3.0, None, None)
    """
    found = {float(_WORDS.get(word, word)) for word in map(str, _NUMBERS.findall(text.lower()))}
    return found.pop() if len(found) == 1 else None
