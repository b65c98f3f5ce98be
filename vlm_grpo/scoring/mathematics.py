"""Decides whether an answer to a mathematical question is right: a choice among options, or an expression."""

import functools
import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from vlm_grpo.scoring.answers import extract_answer
from vlm_grpo.scoring.quantities import extract_number

MOST_CHARACTERS = 400  # longest expression that is compared symbolically


# ---- multiple choice ----

_ALONE = re.compile(
    r"\W*(?:option|choice|answer|\\text|\\mathrm|\\boxed|[\s{:(\[])*\W*([A-Za-z])(?:[\s)\]}.:,*_`$\"']|\\)*"
)
# A small a or i may be a word: it counts where the sentence, the line or the bracket ends behind it
_LETTER = r"(?:[A-Zb-hj-z](?![\w'\u2019])|[ai](?=[,;:!?)\]}*_\"$\n]|\.(?!\w)|\s*\Z))"
_STATED = re.compile(
    r"\b(?:answer|option|choice|correct(?: one)?)\b(?:\s+(?:choice|option))?[\s:*_]*(?:\bis\b|\bwould be\b|=)?"
    rf"[\s:*_]*(?:(?:option|choice)\s+)?[*_]*(?:\(([A-Za-z])\)|(?-i:({_LETTER})))",
    re.IGNORECASE,
)
_MORE = re.compile(rf"[\s)*_]*(?:,|/|&|;|\bor\b|\band\b)\s*(?:or\s+|and\s+)?[*_(]*{_LETTER}")
_LEADING = re.compile(r"[\s*_]*(?:\(([A-Za-z])\)|([A-Za-z])[.):]|([A-Z])\s*\n)")
_LISTED = re.compile(r"(?<!\w)\(?([A-Z])(?:[.)]|(?<=\n[A-Z])[ *_]{0,4}$)", re.MULTILINE)  # marked, or alone in a line
_BRACKETED = re.compile(r"\(([A-Z])\)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")


def option_letters(count: int) -> str:
    """The letters that label `count` options, at most 26: "ABCD" for 4."""
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:count]


def chosen_option(answer: str, options: Sequence[str]) -> int | None:
    """The index of the option that an answer chooses; None if it chooses no option or more than one.

    | read as option B of 2/3, 4/5 | examples |
    |---|---|
    | the letter alone | `B`, `(b)`, `B.`, `**B**`, `\\boxed{\\text{B}}`, `Option B` |
    | the letter, then the option's text, or any | `B. 4/5`, `(B) 4/5` |
    | a statement, the last one | `The answer is (B).`, `Answer: B`, `the correct option is B because …` |
    | the option's text, or its number | `4/5`, `0.8`, `It must be 4/5.` |

    An answer with two letters, or with the texts of two options, chooses none, so listing options cannot help. A letter
    within a sentence is a word, unless the sentence states it as the answer. If the options are letters themselves, a
    capital letter means the option with that label, and a small letter the option with that text.
    """
    text = unicodedata.normalize("NFKC", extract_answer(answer)).strip()[:20_000]
    boxes = list(_BOXED.finditer(text))
    if boxes:
        text = _braces(text, boxes[-1].end()).strip()
    alone = _ALONE.fullmatch(text[:200]) if len(text) <= 200 else None
    chosen = _of_letter(alone[1], options) if alone else None
    if chosen is None:
        chosen = _of_text(text, options)
    if chosen is not None:
        return chosen
    stated = list(_STATED.finditer(text))
    if stated:
        letter = next(letter for letter in stated[-1].groups() if letter)
        return None if _MORE.match(text, stated[-1].end()) else _of_letter(letter, options)
    leading = _LEADING.match(text)
    if leading:
        letter = next(letter for letter in leading.groups() if letter)
        listed = set(_LISTED.findall(text, leading.end()))
        return _of_letter(letter, options) if listed <= {letter.upper()} else None
    bracketed = set(_BRACKETED.findall(text))
    if bracketed:
        return _of_letter(bracketed.pop(), options) if len(bracketed) == 1 else None
    return _by_content(text, options)


def _of_letter(letter: str, options: Sequence[str]) -> int | None:
    """The option that a letter labels; the option whose text it is, if the letter is small or labels no option."""
    if letter.islower() and letter in map(_stripped, options):
        return _of_text(letter, options)
    at = option_letters(len(options)).find(letter.upper())
    return _of_text(letter, options) if at < 0 else at


def _of_text(text: str, options: Sequence[str]) -> int | None:
    """The first option with this text; without an exact match, the first that differs in case only."""
    for read in (_stripped, _bare):
        texts = [read(option) for option in options]
        if read(text) and read(text) in texts:
            return texts.index(read(text))
    return None


def _stripped(text: str) -> str:
    return " ".join(text.strip(" \t\n.*_$`\"'").split())


def _bare(text: str) -> str:
    return _stripped(text.casefold())


def _by_content(text: str, options: Sequence[str]) -> int | None:
    """The only option whose text stands in the answer, or whose number equals it; "a" in a sentence is a word."""
    spoken = _bare(text)
    said = [
        index
        for index, option in enumerate(options)
        if not re.fullmatch("[a-z]?", _bare(option))
        and re.search(rf"(?<![\w.]){re.escape(_bare(option))}(?!\w|\.\d)", spoken)
    ]
    longest = [i for i in said if not any(i != j and _bare(options[i]) in _bare(options[j]) for j in said)]
    if said:
        return longest[0] if len(longest) == 1 else None
    number = extract_number(text)
    numbers = [extract_number(option) for option in options]
    equal = [index for index, other in enumerate(numbers) if number is not None and other == number]
    return equal[0] if len(equal) == 1 else None


# ---- symbolic equality ----

_STATEMENT = re.compile(r"(?:answer|result)(?:\s+is)?\s*:?\s*(?:\bis\b|=)?\s*", re.IGNORECASE)
_LONG = rf"(.{{1,{MOST_CHARACTERS}}}?)"  # a bound, since every opening without an end is looked at to there
_MATH = re.compile(rf"\$\${_LONG}\$\$|\$([^$\n]+)\$|\\\({_LONG}\\\)|\\\[{_LONG}\\\]", re.DOTALL)
_PLAIN = re.compile(r"[-+]?\d{1,30}(?:\.\d{1,30})?")


def final_expression(answer: str) -> str:
    """The final expression of an answer, as it is written, without delimiters.

    It is the content of the last `\\boxed{…}`, or else the text after the last "the answer is". If that text has words
    around a formula, it is the last formula between dollar signs or in `\\(…\\)`.
    """
    text = extract_answer(answer)
    boxes = list(_BOXED.finditer(text))
    if boxes:
        return _braces(text, boxes[-1].end()).strip()
    stated = list(_STATEMENT.finditer(text))
    if stated and text[stated[-1].end() :].strip():
        text = text[stated[-1].end() :].strip().partition("\n")[0]
    formulas = list(_MATH.finditer(text))
    if formulas:
        text = next(part for part in formulas[-1].groups() if part)
    return text.strip().strip("*`").removesuffix(".").strip()


def math_equal(answer: str, reference: str) -> bool:
    """Whether an answer equals the reference mathematically, as 1/2 equals \\frac{2}{4}, or 2\\sqrt{3} equals sqrt(12).

    math-verify compares the `final_expression` of both. It may take very long and its own time limit is off, so call
    this function under a deadline, as in a task with `reward_timeout_s`.
    """
    given, wanted = final_expression(answer), final_expression(reference)
    if not given or not wanted or len(given) > MOST_CHARACTERS:
        return False
    if _bare(given) == _bare(wanted):
        return True
    if _PLAIN.fullmatch(given) and _PLAIN.fullmatch(wanted):
        return Fraction(given) == Fraction(wanted)
    if not re.search(r"[\w\\]", given):
        return False
    return _symbolically_equal(given, wanted)


def _symbolically_equal(given: str, wanted: str) -> bool:
    """Whether math-verify finds both equal. Expressions that it cannot read or compare are not equal; none raises."""
    parse, verify = load_math_verify()
    first, second = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (wanted, given))
    return bool(first and second) and bool(verify(first, second, timeout_seconds=None))


@functools.cache
def load_math_verify() -> tuple[Any, Any]:
    """math-verify's functions parse and verify. They are imported here because importing sympy takes seconds."""
    from math_verify import parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its alarms are off
    return parse, verify


def _braces(text: str, start: int) -> str:
    """The content of the braces that open at `start`; the rest of the text if they never close."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    return text[start + 1 :]
