"""Patterns for the spellings of positions in answers: brackets, names of sides, units, separators."""

import re
from typing import NamedTuple

_LIMIT = 1e15  # nothing this large is a coordinate; it also keeps every sum finite


# One character for one character, so that positions in the translated text are positions in the text.
_FORMS: dict[int, str] = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms

_LETTER = r"A-Za-z_\u00C0-\u024F\u0370-\u052F"  # letters that take digits into a word; Chinese ones do not
_NOT_IN_WORD = rf"(?<![{_LETTER}\d])"
_WORD_END = rf"(?![{_LETTER}\d])"
_DIGITS = r"(?:\d{1,15}(?:\.\d{1,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,2})?"
_UNIT = r"(?:px|pixels?|%|像素)"
_CORNER = r"(?:(?:top|upper|bottom|lower)[\s_-]{0,3}(?:left|right)|(?:left|right)[\s_-]{0,3}(?:top|upper|bottom|lower))"
_NAME = (
    rf"(?:{_CORNER}_?[xy]|[xy]_?(?:min|max|[0-2])?|(?:min|max)_?[xy]|c_?[xy]|left|right|top|bottom|w|h|width|height)"
)

_TOKEN = re.compile(
    rf"""
    (?P<loc><loc_?[-+]?{_DIGITS}>)
  | (?P<number>(?<![{_LETTER}\d.])[-+]?{_DIGITS}(?:(?!\.?\d)(?![{_LETTER}])|(?={_UNIT}{_WORD_END})))
  | (?P<filler>\(\s?[xy]_?\d?\s?,\s?[xy]_?\d?\s?\))
  | (?P<corner>{_NOT_IN_WORD}{_CORNER}(?:_?(?:corner|point|coordinates?))?{_WORD_END}|[左右][上下])
  | (?P<name>{_NOT_IN_WORD}(?:{_NAME}{_WORD_END}|<{_NAME}>))
  | (?P<to>{_NOT_IN_WORD}(?:to|until|through){_WORD_END}|[-=]>|[-~\u2013\u2014\u2192到至])
  | (?P<word>{_NOT_IN_WORD}(?:and|the|at|is|are|an?|its|of|with|from|corners?|points?|coordinates?|coords?
        |position|located|{_UNIT}){_WORD_END}|[%坐标为是的在点和与角像素])
  | (?P<end_tag></{_NAME}>)
  | (?P<tag><[/|]{{0,2}}[A-Za-z_][\w-]{{0,40}}\|?>)
  | (?P<space>\s+)
  | (?P<open>[\[({{])
  | (?P<close>[\])}}])
  | (?P<mark>[,;:=."'`*])
  | (?P<other>[{_LETTER}\d]+|.)
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# The text of a label is no place for coordinates, whatever digits it holds
_LABEL = re.compile(
    r"""["'\u2018\u2019\u201c\u201d\uff02](?:label|category|category_name|class|class_name|name|object)
        ["'\u2018\u2019\u201c\u201d\uff02]\s{0,20}[:\uff1a]\s{0,20}
        (?:"(?P<double>(?:[^"\\\n]|\\.)*)|'(?P<single>(?:[^'\n]|'(?=\w))*)
          |[\u2018\u2019\u201c\u201d\uff02](?P<curly>[^\u2018\u2019\u201c\u201d\uff02"\n]*))
  | <\|?(?:object_ref_start|ref)\|?>(?P<tagged>[^<\n]*)""",
    re.VERBOSE | re.IGNORECASE,
)
_GAP = re.compile(rf"\s{{0,20}}{_UNIT}?[\"'`]?\.?\s{{0,20}}(?P<separator>[,;/|]?)\s{{0,20}}[\"'`]?", re.IGNORECASE)
_LONGEST_GAP = 80  # characters between two numbers of one row
_MOST_FILLER = 40  # tokens between two parts of one box


_LOCATION_SIDES = {"<loc": ("y1", "x1", "y2", "x2"), "<loc_": ("x1", "y1", "x2", "y2")}
_LAYOUTS = tuple(
    frozenset(sides.split())
    for sides in ("x1 y1 x2 y2", "x0 y0 x1 y1", "x y w h", "x0 y0 w h", "x1 y1 w h", "cx cy w h")
)


class _Token(NamedTuple):
    kind: str
    start: int
    end: int
    text: str


class _Part(NamedTuple):
    """A possible piece of a box: tokens `first` to `last` with the `numbers` among them.

    `form` is "row" (four numbers), "list" (six or more in brackets), "pair" (in brackets, tags, or alone in the text),
    "bare" (any other pair), "<loc" or "<loc_" (a location token), or the name of the side that a single number gives.
    """

    form: str
    first: int
    last: int
    numbers: tuple[_Token, ...]


class _Link(NamedTuple):
    """The text between two parts: brackets, a word like "to", the name of a corner, or only punctuation."""

    brackets: bool
    to: bool
    corner: str
    plain: bool


_FILLER = frozenset({"filler", "name", "corner", "to", "word", "space", "open", "close", "mark", "end_tag"})
