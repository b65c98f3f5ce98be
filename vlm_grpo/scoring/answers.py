"""Finds the answer in a model's text and reads a box (x1, y1, x2, y2) from it; exact match and the IoU of boxes."""

import re
from collections.abc import Iterable, Sequence

from vlm_grpo.scoring.located import Box, find_coordinates


def box_iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two continuous boxes; 0 where a box is empty or its corners are swapped."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    overlap = width * height
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return min(1.0, overlap / (area - overlap))


def exact_match(answer: str, references: str | Iterable[str]) -> float:
    """1.0 if the answer equals one of the references, apart from case and surrounding white space; else 0.0."""
    references = [references] if isinstance(references, str) else references
    return float(any(answer.strip().casefold() == reference.strip().casefold() for reference in references))


_TAG = re.compile(r"<\s{0,3}(/?)\s{0,3}(think|answer)\s{0,3}>", re.IGNORECASE)


def answer_span(text: str) -> tuple[int, int]:
    """Start and end of the answer in a model's text, which may contain a thought and tags, or be the bare answer.

    The thought is skipped: the answer begins after the last `</think>`. A thought that never closes ends at the first
    answer tag. In the rest, the answer begins after the first `<answer>` and ends at the next answer tag or at the end
    of the text.
    """
    tags = [(match[1] == "/", match[2].lower(), match.start(), match.end()) for match in _TAG.finditer(text)]
    start, end = 0, len(text)
    thought_ends = [stop for closes, name, _, stop in tags if closes and name == "think"]
    thought_starts = [begin for closes, name, begin, _ in tags if not closes and name == "think"]
    if thought_ends:
        start = thought_ends[-1]
    answers = [
        (begin, stop) for closes, name, begin, stop in tags if not closes and name == "answer" and begin >= start
    ]
    if answers:
        start = answers[0][1]
        return start, min((begin for _, name, begin, _ in tags if name == "answer" and begin >= start), default=end)
    if thought_starts and not thought_ends:
        end = thought_starts[0]
    return start, min((begin for closes, name, begin, _ in tags if closes and begin >= start), default=end)


def extract_answer(text: str) -> str:
    """The answer in a model's text, stripped of surrounding white space; see answer_span."""
    start, end = answer_span(text)
    return text[start:end].strip()


def parse_box(text: str) -> Box | None:
    """The first box of the answer in `text`, with its numbers as they are written; None if there is none.

    `answer_span` finds the answer, so a box in the thought does not count. Only the first box counts, so listing more
    boxes never helps. No rule depends on the size of a number.

    | accepted | examples |
    |---|---|
    | four numbers in any brackets, quotes, fence, tag or none | `[12, 45, 38, 97]`, `12 45 38 97`, `dog[[1,2,3,4]]` |
    | one kind of separator, or a second between pairs | `1,2,3,4`, `1 2 3 4`, `1 2, 3 4`, `1;2;3;4`, `1/2/3/4` |
    | sign, decimals, exponent, zeros, quotes, units | `-5`, `.5`, `120.`, `1e-05`, `007`, `"14"`, `14px`, `14%` |
    | full-width and other decimal digits and brackets | as their ASCII forms |
    | two pairs with "to" or words for corners between | `(1,2),(3,4)`, `from (1, 2) to (3, 4)`, `1,2 - 3,4` |
    | four pairs side by side: their bounding box | `[[1, 2], [3, 2], [3, 4], [1, 4]]` |
    | named corners or sides, in any order | `x1: 1 y1: 2 x2: 3 y2: 4`, x0 to y1, xmin to ymax, left to bottom |
    | x, y twice | `x=1, y=2 and the bottom-right is at x=3, y=4` |
    | a corner or centre with its size | `x=1, y=2, w=2, h=2`, `cx=2 …`, `(1, 2) with width 2 and height 2` |
    | PaliGemma's location tokens, y first | `<loc0002><loc0001><loc0004><loc0003>` |
    | Florence-2's location tokens, x first | `<loc_1><loc_2><loc_3><loc_4>` |

    Not a box: another count of numbers in a row, a lone point, dates, times, versions, NaN, numbers inside words.
    """
    start, end = answer_span(text)
    for located in find_coordinates(text):
        coordinates = located.coordinates
        if located.xyxy is not None and start <= coordinates[0].start and coordinates[-1].end <= end:
            return located.xyxy
    return None
