"""Reads numbers as exact fractions: digits with separators, units and scales, sums, LaTeX, number words."""

import math
import re
import unicodedata
from fractions import Fraction

MOST_DIGITS = 300  # longer numbers, and larger powers, are not read
MOST_DEPTH = 20  # nested brackets
CURRENCY = (
    r"(?:[$€£¥₹₩₽¢]|(?:USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|US|Rs\.?|RM)(?![A-Za-z])\s?|(?:USD|EUR|GBP|Rs\.?|RM)(?=\d))"
)
DIGITS = r"(?:\d+(?:[.,'_]\d+)*|\.\d+)(?:[eE][-+]?\d+)?"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(r"[kK](?![A-Za-z])|\s*-?(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
_MONEY_SCALE = re.compile(r"(?:(m|mn|million)|(b|bn|billion))(?![a-z])", re.IGNORECASE)
_DASHES = dict.fromkeys(map(ord, "−‐‑‒–—﹣－"), "-")  # noqa: RUF001
_SPACES_IN_NUMBERS = re.compile(
    r"(?<=\d)(?:[ ](?=\d{3} \d{3}(?!\d))|(?<=\d[ ]\d{3})[ ]|[\u00a0\u2009\u202f\u2007]|\\,|\\!|\{,\})(?=\d{3}(?!\d))"
)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_RAISED = re.compile(r"(?<=[\d)])(?=⁻?[⁰¹²³⁴-⁹])")
_FRACTION_SIGN = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")


def plain(text: str) -> str:
    """The text without calculator annotations, with minus signs, digits, exponents and fraction signs in ASCII."""
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


def without_latex(text: str) -> str:
    """The text with LaTeX's fractions, products, powers and so on replaced by the signs that `SumReader` reads."""
    for pattern, by in _LATEX:
        text = pattern.sub(by, text)
    return text


class SumReader:
    """Reads one sum of numbers from a place in a text; `at` is where it stopped."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def sum(self, depth: int) -> Fraction | None:
        """The value of the sum at `at`; None if there is none. `depth` counts the brackets around it."""
        total = self._product(depth)
        while total is not None and (sign := self._take(r"\s*([-+])(?=\s*(?:[\d.($]|sqrt\())")):
            term = self._product(depth)
            if term is None:
                return None
            total = total + term if sign == "+" else total - term
            if not _fits(total):
                return None
        return total

    def _product(self, depth: int) -> Fraction | None:
        total = self._power(depth)
        while total is not None and (sign := self._take(r"\s*([*/])(?=\s*(?:[-\d.($]|sqrt\())")):
            factor = self._power(depth)
            if factor is None or (sign == "/" and factor == 0):
                return None
            total = total * factor if sign == "*" else total / factor
            if not _fits(total):
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
        currency = self._take(rf"\s*({CURRENCY})")
        root = self._take(r"\s*(sqrt)(?=\()")
        if self._take(r"\s*(\()"):
            inside = self.sum(depth + 1) if depth < MOST_DEPTH else None
            if inside is None or not self._take(r"\s*(\))"):
                return None
            return _square_root(inside) if root else inside
        negative = bool(currency) and self._take(r"\s?([-+])") == "-"
        match = re.compile(rf"\s*(\d{{1,3}}(?: \d{{3}})+(?![\d.,/])|{DIGITS})").match(self.text, self.at)
        value = None if match is None else read_digits(match[1].replace(" ", ""))
        if match is None or value is None:
            return None
        self.at = match.end()
        value = self._mixed(value)
        value *= self._scale(bool(currency))
        return -value if negative else value

    def _mixed(self, whole: Fraction) -> Fraction:
        """The value of a mixed number: `whole` plus a proper fraction that follows it without an operator, if any."""
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
        scale, self.at = scale_at(self.text, self.at, is_money)
        return scale

    def _take(self, pattern: str) -> str | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[1]


def scale_at(text: str, at: int, is_money: bool) -> tuple[int, int]:
    """The factor written behind a number that ends at `at`, such as 1000 for "5k", and the position behind it."""
    match = _SCALE.match(text, at)
    if match:
        return 10 ** _SCALES[match[1].lower()] if match[1] else 1000, match.end()
    match = _MONEY_SCALE.match(text, at) if is_money else None
    return (1, at) if match is None else (10**6 if match[1] else 10**9, match.end())


def _fits(value: Fraction) -> bool:
    return max(abs(value.numerator), value.denominator).bit_length() <= 4 * MOST_DIGITS


def _square_root(value: Fraction) -> Fraction | None:
    if value < 0:
        return None
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return root if root * root == value else None


def read_digits(digits: str) -> Fraction | None:
    """The value of digits with separators; None if they are no number."""
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


_UNITS = dict(
    zero=0, one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11, twelve=12,
    thirteen=13, fourteen=14, fifteen=15, sixteen=16, seventeen=17, eighteen=18, nineteen=19, twenty=20, thirty=30,
    forty=40, fifty=50, sixty=60, seventy=70, eighty=80, ninety=90,
)  # fmt: skip


_WORDS = re.compile(rf"\b(?:(?:{'|'.join((*_UNITS, *_SCALES))})(?:[\s-]+(?:and\s+)?(?=[a-z])|\b))+", re.IGNORECASE)


def word_number(text: str) -> Fraction | None:
    """The last number in words, such as "minus twenty-four"; "one" counts only if there is no other."""
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
