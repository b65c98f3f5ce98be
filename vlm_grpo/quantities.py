"""The number that a worked solution ends in, as an exact fraction."""

import itertools
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

from vlm_grpo.scoring import extract_answer

MOST_DIGITS = 300  # of a number; longer ones, and larger powers, are no answer
MOST_DEPTH = 20  # brackets in brackets
MOST_MARKS = 50  # of a kind that are looked at

_CURRENCY = (
    r"(?:[$€£¥₹₩₽¢]|(?:USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|US|Rs\.?|RM)(?![A-Za-z])\s?|(?:USD|EUR|GBP|Rs\.?|RM)(?=\d))"
)
_DIGITS = r"(?:\d+(?:[.,'_]\d+)*|\.\d+)(?:[eE][-+]?\d+)?"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(r"[kK](?![A-Za-z])|\s*-?(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_MONEY_SCALE = re.compile(r"(?:(m|mn|million)|(b|bn|billion))(?![a-z])", re.IGNORECASE)


def extract_number(text: str) -> Fraction | None:
    """The number a text gives as its answer; None if it gives none.

    The answer is found as `answer_span` says: a thought does not count. In it, the first of these that is there:
    what follows the first `####` (also `##`, `###` before a number), the last `\\boxed{…}` or `\\fbox{…}`, what follows
    the last "answer is", "answer:", "result:" and the like, the last number. A text that goes on with a new question is
    cut there. After a mark there is only its own content: `#### unknown` and `\\boxed{}` have no number.

    | read as | examples |
    |---|---|
    | separators of thousands | `1,250`, `1,250.00`, `1.250,00`, `1,00,000`, `1'000`, `1 000 000`, `1{,}250` |
    | decimal comma, where it cannot be of thousands | `2,5` |
    | currency, percent, degrees, units, scale | `-$5`, `€990`, `25%` (25), `−18°F`, `3 hours`, `5k`, `2 million` |
    | fractions, mixed numbers, exponents, LaTeX | `3/4`, `1 1/2`, `½`, `1e3`, `\\frac{3}{4}`, `3.6 \\times 10^{3}` |
    | a sum to be evaluated, the right side of an equation | `2^3`, `2³`, `3 * 60`, `x = 36`, `2 + 3 = 5` |
    | number words, where the answer has no digit | `eighteen` |

    Where no mark is given, these are not the answer as long as there is another number: list numbers, numbers in round
    brackets or inside words, `step 3`, ratios, ordinals, `every 2`, dates.
    """
    answer = _plain(extract_answer(text))
    marked = _marked(answer)
    return _last_number(answer) if marked is None else _first_value(marked)


def number_equal(answer: str, reference: str) -> bool:
    """Whether both texts give a number, and the same one exactly: 0.5 equals 1/2, 33.3333 does not equal 33."""
    first, second = extract_number(answer), extract_number(reference)
    return first is not None and first == second


# ---- where the answer stands ----

_HASHES = re.compile(r"(?<!#)#{2,}[ \t]*")
_AT_NUMBER = re.compile(
    r"[\s*_`~(\[{=:≈$\\]*(?:(?:approximately|approx\.?|about|roughly|exactly|only)\s+)?[*_`]*"
    rf"(?:\\?boxed|\\?fbox|\\?[dtc]?frac|-?\s?{_CURRENCY}?[*_`]*[-+]?\s?{_CURRENCY}?\s?(?:\d|\.\d))"
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
    """The text after the mark of the final answer; None where there is no mark."""
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
        if _word_number(sentence) is not None and not re.search(r"\d", rest):
            return sentence
    return None


def _after_hashes(text: str, start: int, count: int) -> str | None:
    """The content behind `count` number signs; None for what is a heading."""
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
    """Where a text that has given its answer goes on with a new question; its length if it does not."""
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


# ---- one way of writing ----

_DASHES = dict.fromkeys(map(ord, "−‐‑‒–—﹣－"), "-")  # noqa: RUF001
_SPACES_IN_NUMBERS = re.compile(
    r"(?<=\d)(?:[ ](?=\d{3} \d{3}(?!\d))|(?<=\d[ ]\d{3})[ ]|[\u00a0\u2009\u202f\u2007]|\\,|\\!|\{,\})(?=\d{3}(?!\d))"
)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_RAISED = re.compile(r"(?<=[\d)])(?=⁻?[⁰¹²³⁴-⁹])")
_FRACTION_SIGN = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")


def _plain(text: str) -> str:
    """Calculator annotations gone, one minus sign, digits of any script, exponents and fraction signs as ASCII."""
    text = _RAISED.sub("^", _SPACES_IN_NUMBERS.sub(",", _ANNOTATION.sub("", text)))
    text = unicodedata.normalize("NFKC", _FRACTION_SIGN.sub(" ", text).translate(_DASHES)).replace("\u2044", "/")
    text = "".join(str(unicodedata.decimal(c)) if not c.isascii() and c.isdecimal() else c for c in text)
    return text.translate(_DASHES).replace("。", ". ")


_LATEX = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r" ((\1)/(\2))"),
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" ((\1)/(\2))"),
        (r"\\sqrt\s*\{([^{}]*)\}", r" sqrt(\1)"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°|\\degree", " "),
        (r"\\(?:text|textbf|mathrm|mathbf|mbox|textit|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×⋅·]|(?<=\d)\s*[xX]\s*(?=\d)", "*"),
        (r"\\div(?![a-zA-Z])|÷", "/"),
        (r"(?<=[\d)])\*\*(?=[\d(])", "^"),
        (r"\^\s*\{([^{}]*)\}", r"^(\1)"),
        (r"\\(?:left|right|displaystyle|quad|qquad|!)(?![a-zA-Z])", " "),
        (r"\\(?:approx|simeq)(?![a-zA-Z])|≈", "="),
        (r"\\([$%])", r"\1"),
        (r"\\[ ,;:!~]", " "),
    )
]
_UNKNOWN = re.compile(r"\\(?:pi|infty|sqrt|theta|alpha|beta)\b|[π∞√]")


def _first_value(region: str) -> Fraction | None:
    """The value of what stands behind a mark: its first expression, or the right side of its equation."""
    region = region[:2000]
    boxes = list(_BOX.finditer(region))
    if boxes:
        region = _box_content(region, boxes[-1].end())
    region = region.strip().partition("\n")[0]
    for pattern, by in _LATEX:
        region = pattern.sub(by, region)
    sides = [side for side in region.split("=") if re.search(r"\d", side)]
    if not sides:
        return _word_number(region)
    chosen = sides[-1] if _leads(sides) else sides[0]
    if _UNKNOWN.search(chosen):
        return None
    for at in _number_starts(chosen):
        reader = _Reader(chosen, at)
        value = reader.sum(0)
        if value is not None or "(" not in chosen[at : reader.at + 1]:
            return value
    return None


def _leads(sides: list[str]) -> bool:
    """Whether the sides belong to one equation: all that is left of an equals sign is sums, names and units."""
    return all(not re.search(r"[.;]\s", side) for side in sides[:-1])


def _number_starts(text: str) -> Iterator[int]:
    for match in re.finditer(rf"sqrt\(|[-+(]*\s?(?:{_CURRENCY})?\s?[-+(]*\s?(?:\d|\.\d)", text):
        at = match.start()
        if at and text[at].isdigit() and text[at - 1].isalpha() and text[at - 1].isascii():
            continue
        yield at


class _Reader:
    """Reads one sum of numbers from a place in a text; `at` is where it stopped."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def sum(self, depth: int) -> Fraction | None:
        total = self._product(depth)
        while total is not None and (sign := self._take(r"\s*([-+])(?=\s*[\d.($])")):
            term = self._product(depth)
            if term is None:
                return None
            total = total + term if sign == "+" else total - term
        return total

    def _product(self, depth: int) -> Fraction | None:
        total = self._power(depth)
        while total is not None and (sign := self._take(r"\s*([*/])(?=\s*[-\d.($])")):
            factor = self._power(depth)
            if factor is None or (sign == "/" and factor == 0):
                return None
            total = total * factor if sign == "*" else total / factor
            if max(abs(total.numerator), total.denominator).bit_length() > 4 * MOST_DIGITS:
                return None
        return total

    def _power(self, depth: int) -> Fraction | None:
        negative = self._take(r"\s*([-+])") == "-"
        base = self._atom(depth)
        if base is not None and self._take(r"\s*(\^)(?=\s*[-\d(])"):
            exponent = self._power(depth + 1) if depth < MOST_DEPTH else None
            if exponent is None or exponent.denominator != 1 or abs(exponent) > 64 or (base == 0 and exponent < 0):
                return None
            if max(abs(base.numerator), base.denominator).bit_length() * abs(exponent) > 4 * MOST_DIGITS:
                return None
            base = base**exponent.numerator
        return -base if negative and base is not None else base

    def _atom(self, depth: int) -> Fraction | None:
        currency = self._take(rf"\s*({_CURRENCY})")
        root = self._take(r"\s*(sqrt)(?=\()")
        if self._take(r"\s*(\()"):
            inside = self.sum(depth + 1) if depth < MOST_DEPTH else None
            if inside is None or not self._take(r"\s*(\))"):
                return None
            return _square_root(inside) if root else inside
        negative = bool(currency) and self._take(r"\s?([-+])") == "-"
        match = re.compile(rf"\s*(\d{{1,3}}(?: \d{{3}})+(?![\d.,/])|{_DIGITS})").match(self.text, self.at)
        value = None if match is None else _read_digits(match[1].replace(" ", ""))
        if match is None or value is None:
            return None
        self.at = match.end()
        value = self._mixed(value)
        value *= self._scale(bool(currency))
        return -value if negative else value

    def _mixed(self, whole: Fraction) -> Fraction:
        """Adds a proper fraction that follows a whole number without an operator."""
        match = re.compile(r"\s+(?:(\d{1,4})/(\d{1,4})(?![\d/])|\(\((\d{1,4})\)/\((\d{1,4})\)\))").match(
            self.text, self.at
        )
        if match is None or whole.denominator != 1:
            return whole
        top, bottom = (int(part) for part in match.groups() if part)
        if not 0 < top < bottom:
            return whole
        self.at = match.end()
        return whole + Fraction(top, bottom)

    def _scale(self, is_money: bool) -> int:
        scale, self.at = _scale_at(self.text, self.at, is_money)
        return scale

    def _take(self, pattern: str) -> str | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[1]


def _scale_at(text: str, at: int, is_money: bool) -> tuple[int, int]:
    """What a number that ends at `at` is to be multiplied by, such as 1000 for "5k", and where that ends."""
    match = _SCALE.match(text, at)
    if match:
        return 10 ** _SCALES[match[1].lower()] if match[1] else 1000, match.end()
    match = _MONEY_SCALE.match(text, at) if is_money else None
    return (1, at) if match is None else (10**6 if match[1] else 10**9, match.end())


def _square_root(value: Fraction) -> Fraction | None:
    if value < 0:
        return None
    for root in (Fraction(round(float(value.numerator) ** 0.5), round(float(value.denominator) ** 0.5) or 1),):
        if root * root == value:
            return root
    return None


def _read_digits(digits: str) -> Fraction | None:
    """The value of digits with separators; None where they are no number."""
    digits = digits.replace("'", "").replace("_", "")
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MOST_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MOST_DIGITS:
        return None
    if "," in mantissa and "." in mantissa:
        decimal = max(mantissa.rfind(","), mantissa.rfind("."))
        whole, rest = mantissa[:decimal], mantissa[decimal + 1 :]
        if mantissa[decimal] in whole:
            return None
        mantissa = f"{whole.replace(',', '').replace('.', '')}.{rest}"
    elif "," in mantissa:
        grouped = re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+|[1-9]\d?(,\d{2})+,\d{3}", mantissa)
        mantissa = mantissa.replace(",", "" if grouped else ".")
    elif re.fullmatch(r"[1-9]\d{0,2}(\.\d{3}){2,}", mantissa):
        mantissa = mantissa.replace(".", "")
    if mantissa.count(".") > 1:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


# ---- the last number of a text without a mark ----

_IN_BRACKETS = re.compile(r"\([^()\n]*\)")
_LIST_NUMBER = re.compile(r"^[ \t]*(?:[-*•][ \t]+|\d{1,3}[.)][ \t]+(?=\S))", re.MULTILINE)
_LABEL = re.compile(
    r"\b(?:step|table|figure|fig\.|question|problem|equation|example|part|case|option|page|chapter|every|per|each)\s+"
    r"\W{0,2}\Z",
    re.IGNORECASE,
)
_PROSE_NUMBER = re.compile(
    rf"(?P<minus>-?)\s?(?P<currency>(?:{_CURRENCY})\s?)?(?P<sign>[-+]?)(?P<digits>{_DIGITS})"
    r"(?:\s?/\s?(?P<bottom>\d{1,300})(?!/|\.?\d)|\s+(?P<part>\d{1,4})/(?P<parts>\d{1,4})(?![/\d]))?"
)
_ALONE = re.compile(
    rf"[-+]?\s*(?:{_CURRENCY})?[-+]?(?:{_DIGITS}|\d{{1,3}}(?: \d{{3}})+)"
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
    return _word_number(text)


def _last_candidates(text: str) -> list[Fraction]:
    """All numbers of a text; the unlikely ones only where there are no others. The last is the one meant."""
    for pattern, by in _LATEX:
        text = pattern.sub(by, text)
    text = _DATE.sub(" ", text.replace("((", "").replace(")/(", "/").replace("))", ""))
    likely: list[Fraction] = []
    unlikely: list[Fraction] = []
    for match in _PROSE_NUMBER.finditer(text):
        minus, currency, sign, digits, bottom, part, parts = match.groups()
        start = match.start("digits")
        before = text[start - 1 : start]
        value = _read_digits(digits)
        if value is None or (before.isalpha() and before < "\u2e80" and not currency):  # inside a word
            continue
        if bottom and int(bottom):
            value /= int(bottom)
        if part and 0 < int(part) < int(parts):
            value += Fraction(int(part), int(parts))
        value *= _scale_at(text, match.end(), bool(currency))[0]
        if sign == "-" or (minus and not _ends_operand(text[max(0, match.start() - 8) : match.start()])):
            value = -value
        around = text[max(0, start - 24) : start], text[match.end() : match.end() + 4]
        odd = _LABEL.search(around[0]) or (around[0].endswith(":") and around[0][-2:-1].isdigit())
        odd = odd or re.match(r"(?:st|nd|rd|th)\b|:\d", around[1])
        (unlikely if odd else likely).append(value)
    return likely or unlikely


def _ends_operand(before: str) -> bool:
    """Whether a minus after this text subtracts, or joins, rather than being a sign."""
    stripped = before.rstrip()
    if not stripped:
        return False
    if before == stripped:
        return stripped[-1].isalnum() or stripped[-1] in ")%$"
    return stripped[-1].isdigit() or stripped[-1] in ")%"


# ---- number words ----

_UNITS = dict(
    zero=0, one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11, twelve=12,
    thirteen=13, fourteen=14, fifteen=15, sixteen=16, seventeen=17, eighteen=18, nineteen=19, twenty=20, thirty=30,
    forty=40, fifty=50, sixty=60, seventy=70, eighty=80, ninety=90,
)  # fmt: skip
_WORDS = re.compile(rf"\b(?:(?:{'|'.join((*_UNITS, *_SCALES))})(?:[\s-]+(?:and\s+)?(?=[a-z])|\b))+", re.IGNORECASE)


def _word_number(text: str) -> Fraction | None:
    """The last number that is spelt out, such as "minus twenty-four"; "one" only where it is all there is."""
    if re.search(r"\d", text):
        return None
    text = text[-2000:]
    found = [match for match in _WORDS.finditer(text)]
    found = [m for m in found if m[0].strip().lower() != "one"] or [
        m for m in found if not text.replace(m[0], "").strip(" .*_")
    ]
    if not found:
        return None
    total = group = 0
    for word in re.findall(r"[a-z]+", found[-1][0].lower()):
        if word in _UNITS:
            group += _UNITS[word]
        elif word == "hundred":
            group = max(group, 1) * 100
        elif word in _SCALES:
            total, group = total + max(group, 1) * 10 ** _SCALES[word], 0
    negative = re.search(r"\b(?:minus|negative)\s+\Z", text[: found[-1].start()], re.IGNORECASE)
    return Fraction(-(total + group) if negative else total + group)
