"""Reads the final number of a worked solution as an exact fraction."""

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction

from vlm_grpo.scoring.answers import extract_answer
from vlm_grpo.scoring.numerals import (
    CURRENCY,
    DIGITS,
    SumReader,
    plain,
    read_digits,
    scale_at,
    without_latex,
    word_number,
)

MOST_MARKS = 50  # marks of each kind that are considered


def extract_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None if it gives none.

    `answer_span` finds the answer, so a thought does not count. The number is taken from the first of these places that
    exists: after the first `####` (or `##`, `###` before a number); in the last `\\boxed{…}` or `\\fbox{…}`; after the
    last "answer is", "answer:", "result:" and so on; the last number. If the text continues with a new question, that
    part is ignored. The result is None if `####` or a box holds no number: `#### unknown`, `\\boxed{}`.

    | read as | examples |
    |---|---|
    | separators of thousands | `1,250`, `1,250.00`, `1.250,00`, `1,00,000`, `1'000`, `1 000 000`, `1{,}250` |
    | decimal comma, where it cannot be of thousands | `2,5` |
    | currency, percent, degrees, units, scale | `-$5`, `€990`, `25%` (25), `−18°F`, `3 hours`, `5k`, `2 million` |
    | fractions, mixed numbers, exponents, LaTeX | `3/4`, `1 1/2`, `½`, `1e3`, `\\frac{3}{4}`, `3.6 \\times 10^{3}` |
    | a sum to be evaluated, the right side of an equation | `2^3`, `2³`, `3 * 60`, `x = 36`, `2 + 3 = 5` |
    | number words, where the answer has no digit | `eighteen` |

    Without a mark, some numbers are taken only if there are no others: list numbers, numbers in round brackets or
    inside words, `step 3`, ratios, ordinals, `every 2`, dates.
    """
    answer = plain(extract_answer(text))
    marked = _marked(answer)
    return _last_number(answer) if marked is None else _first_value(marked)


def number_equal(answer: str, reference: str) -> bool:
    """Whether both texts give a number and the numbers are exactly equal: 0.5 equals 1/2, 33.3333 does not equal 33."""
    first, second = extract_number(answer), extract_number(reference)
    return first is not None and first == second


# ---- where the answer stands ----

_HASHES = re.compile(r"(?<!#)#{2,}[ \t]*")
_AT_NUMBER = re.compile(
    r"[\s*_`~(\[{=:≈$\\]*(?:(?:approximately|approx\.?|about|roughly|exactly|only)\s+)?[*_`]*"
    rf"(?:\\?boxed|\\?fbox|\\?[dtc]?frac|-?\s?\\?sqrt|-?\s?{CURRENCY}?[*_`]*[-+]?\s?{CURRENCY}?\s?(?:\d|\.\d))"
)
_HEADING = re.compile(r"\W*(?:step|part|solution|calculation|explanation|given|method|problem|question|case)\b", re.I)
_ANSWER_HEADING = re.compile(r"\W*(?:final\s+)?(?:answer|result)\W*", re.IGNORECASE)
_SPACE, _LINE = re.compile(r"\s*"), re.compile(r"[^\n]{0,2000}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_CUE = re.compile(
    r"\b(?:answers?|result|solution|total|sum)\W{0,4}"
    r"(?:(?<=:)|(?<==)|\b(?:is|are|was|be|becomes|equals|comes to|turns out to be)\b)[\s:*_=]{0,9}",
    re.IGNORECASE,
)
_NEW_QUESTION = re.compile(r"\n\W{0,4}(?:Question|Q|Problem|Human|User)\W{0,3}\d{0,4}\W{0,3}:")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")


def _marked(text: str) -> str | None:
    """The text after the mark of the final answer; None if there is no mark."""
    for match in itertools.islice(_HASHES.finditer(text), MOST_MARKS):
        content = _after_hashes(text, match.end(), len(match[0].rstrip()))
        if content is not None:
            return content
    text = text[: _end_of_question(text)]
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _box_content(text, boxes[-1].end())
    for cue in reversed(list(_CUE.finditer(text))[-MOST_MARKS:]):
        rest = text[cue.end() :]
        if _AT_NUMBER.match(rest):
            return rest.lstrip("\n")
        if cue[0].rstrip(" *_\n").endswith(":"):
            return None  # a worked solution follows
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        found = _last_candidates(sentence)
        if found:
            return str(found[-1])
        if word_number(sentence) is not None and not re.search(r"\d", rest):
            return sentence
    return None


def _after_hashes(text: str, start: int, count: int) -> str | None:
    """The content behind `count` number signs; None if they begin a heading."""
    at = _SPACE.match(text, start).end() if count >= 4 else start  # type: ignore[union-attr]
    line = _LINE.match(text, at)[0]  # type: ignore[index]
    if _AT_NUMBER.match(line):
        return line
    if count < 4 or not line or _HEADING.match(line):
        return None
    line = line.lstrip("*_ ")
    if _ANSWER_HEADING.fullmatch(line):
        return text[at + len(line) :].strip().partition("\n")[0]
    cue = _CUE.match(line)
    return line[cue.end() :] if cue else line


def _end_of_question(text: str) -> int:
    """The position at which a new question begins after the answer; the text's length if there is none."""
    marks = [match.start() for match in (_BOX.search(text), _CUE.search(text)) if match]
    again = _NEW_QUESTION.search(text, min(marks)) if marks else None
    return again.start() if again else len(text)


def _box_content(text: str, start: int) -> str:
    if not text.startswith("{", start):
        return _SENTENCE_END.split(text[start : start + 100], maxsplit=1)[0]
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return text[start + 1 :].partition("\n")[0]


_PART = re.compile(r"\s*(?:sqrt\(|\})")  # more of what a number with a root belongs to: 2 of 2 sqrt(3)
_UNKNOWN = re.compile(r"\\(?:pi|infty|sqrt|theta|alpha|beta)\b|[π∞√]")


def _first_value(region: str) -> Fraction | None:
    """The value of the text behind a mark: of its first expression, or of the right side of its equation."""
    region = region[:2000]
    boxes = list(_BOX.finditer(region))
    if boxes:
        region = _box_content(region, boxes[-1].end())
    region = without_latex(region.strip().partition("\n")[0])
    sides = [side for side in region.split("=") if re.search(r"\d", side)]
    if not sides:
        return word_number(region)
    chosen = sides[-1] if _leads(sides) else sides[0]
    if _UNKNOWN.search(chosen):
        return None
    for at in _number_starts(chosen):
        reader = SumReader(chosen, at)
        value = reader.sum(0)
        if "sqrt(" in chosen and (value is None or _PART.match(chosen, reader.at)):
            return None
        if value is not None or "(" not in chosen[at : reader.at + 1]:
            return value
    return None


def _leads(sides: list[str]) -> bool:
    """Whether the sides belong to one equation: no sentence ends in any side but the last."""
    return all(not re.search(r"[.;]\s", side) for side in sides[:-1])


def _number_starts(text: str) -> Iterator[int]:
    for match in re.finditer(rf"[-+]?\s?sqrt\(|[-+(]*\s?(?:{CURRENCY})?\s?[-+(]*\s?(?:\d|\.\d)", text):
        at = match.start()
        if at and text[at].isdigit() and text[at - 1].isalpha() and text[at - 1].isascii():
            continue
        yield at


# ---- the last number of a text without a mark ----

_IN_BRACKETS = re.compile(r"\([^()\n]*\)")
_LIST_NUMBER = re.compile(r"^[ \t]*(?:[-*•][ \t]+|\d{1,3}[.)][ \t]+(?=\S))", re.MULTILINE)
_LABEL = re.compile(
    r"\b(?:step|table|figure|fig\.|question|problem|equation|example|part|case|option|page|chapter|every|per|each)\s+"
    r"\W{0,2}\Z",
    re.IGNORECASE,
)
_PROSE_NUMBER = re.compile(
    rf"(?P<minus>-?)\s?(?P<currency>(?:{CURRENCY})\s?)?(?P<sign>[-+]?)(?P<digits>{DIGITS})"
    r"(?:\s?/\s?(?P<bottom>\d{1,300})(?!/|\.?\d)|\s+(?P<part>\d{1,4})/(?P<parts>\d{1,4})(?![/\d]))?"
)
_ALONE = re.compile(
    rf"[-+]?\s*(?:{CURRENCY})?[-+]?(?:{DIGITS}|\d{{1,3}}(?: \d{{3}})+)"
    r"(?:\s*(?:[*×⋅·]|\\times|\\cdot)\s*10(?=\s*\^))?(?:\s*\^\s*\{?-?\d{1,3}\}?)?[%.\s]*"
)
_DATE = re.compile(r"\b\d{1,4}[/-]\d{1,2}[/-]\d{2,4}\b")


def _last_number(text: str) -> Fraction | None:
    if _ALONE.fullmatch(text):
        return _first_value(text)
    for reading in (_LIST_NUMBER.sub("", _IN_BRACKETS.sub(" ", text)), _LIST_NUMBER.sub("", text), text):
        found = _last_candidates(reading)
        if found:
            return found[-1]
    return word_number(text)


def _last_candidates(text: str) -> list[Fraction]:
    """The numbers that may be a text's answer; the last is. Unlikely numbers count only if there are no others."""
    text = _DATE.sub(" ", without_latex(text).replace("((", "").replace(")/(", "/").replace("))", ""))
    likely: list[Fraction] = []
    unlikely: list[Fraction] = []
    for match in _PROSE_NUMBER.finditer(text):
        minus, currency, sign, digits, bottom, part, parts = match.groups()
        start = match.start("digits")
        before = text[start - 1 : start]
        value = read_digits(digits)
        if value is None or (before.isalpha() and before < "\u2e80" and not currency):  # inside a word
            continue
        if bottom and int(bottom):
            value /= int(bottom)
        if part and 0 < int(part) < int(parts):
            value += Fraction(int(part), int(parts))
        value *= scale_at(text, match.end(), bool(currency))[0]
        if sign == "-" or (minus and not _ends_operand(text[max(0, match.start() - 8) : match.start()])):
            value = -value
        around = text[max(0, start - 24) : start], text[match.end() : match.end() + 4]
        odd = _LABEL.search(around[0]) or (around[0].endswith(":") and around[0][-2:-1].isdigit())
        odd = odd or re.match(r"(?:st|nd|rd|th)\b|:\d", around[1])
        (unlikely if odd else likely).append(value)
    return likely or unlikely


def _ends_operand(before: str) -> bool:
    """Whether a minus after this text is an operator or a hyphen, and no sign."""
    stripped = before.rstrip()
    if not stripped:
        return False
    if before == stripped:
        return stripped[-1].isalnum() or stripped[-1] in ")%$"
    return stripped[-1].isdigit() or stripped[-1] in ")%"
