"""Measures of question answering: VQA's soft accuracy, ANLS, relaxed accuracy."""

import re
from collections.abc import Callable, Iterable, Sequence

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_MOST_PERIODS = 32  # the official code passes re.UNICODE, which is 32, where re.sub takes the count
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBER_WORDS = {"none": "0"} | {word: str(value) for value, word in enumerate(_NUMBERS)}
_ARTICLES = {"a", "an", "the"}
_WITH_APOSTROPHES = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd
    he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've
    needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've
    weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll
    why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# A word that lacks one apostrophe gets it back; the one exception stands in the official table like this.
_CONTRACTIONS = {
    word[:at] + word[at + 1 :]: word for word in _WITH_APOSTROPHES.split() for at in range(len(word)) if word[at] == "'"
} | {"somebody'd": "somebodyd"}


def normalise_vqa(answer: str) -> str:
    """The answer as the official VQA evaluation (GT-Vision-Lab/VQA, in Python 3) compares it.

    The steps, in order: newlines and tabs become spaces, and the ends are stripped; each punctuation mark is deleted if
    it stands next to a space anywhere, or if the answer has a comma between digits, and becomes a space otherwise; the
    first 32 periods that no digit follows are deleted; the text becomes lower case; number words to ten (and "none")
    become digits; articles are deleted; contractions get their apostrophe.

    >>> normalise_vqa("The two dogs arent in a blue/white house.")
    "2 dogs aren't in blue white house"
    """
    plain = _strip_vqa(answer)
    cleaned = plain
    deletes_all = _DIGIT_COMMA_DIGIT.search(plain) is not None
    for mark in _MARKS:
        beside_space = f"{mark} " in plain or f" {mark}" in plain
        cleaned = cleaned.replace(mark, "" if deletes_all or beside_space else " ")
    words = [_NUMBER_WORDS.get(word, word) for word in _PERIOD.sub("", cleaned, count=_MOST_PERIODS).lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def _strip_vqa(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """Soft accuracy of `answer` against the `answers` of several people, all normalised.

    It is the mean over the people of min(1, matches among the other people / 3). With ten people it is 0, .3, .6, .9 or
    1 for 0, 1, 2, 3 or more matches. With a single reference it is 1 or 0.

    >>> vqa_accuracy("Two", ["2", "2", "3", "3", "3", "3", "3", "3", "3", "3"])
    0.6
    """
    return soft_accuracy([normalise_vqa(each) for each in answers].count(normalise_vqa(answer)), len(answers))


def official_vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """Soft accuracy as the official code computes it.

    It differs from `vqa_accuracy` if all people gave the same answer, apart from white space: then neither side is
    normalised, and "Yes" against ten "yes" gives 0.
    """
    plain = [_strip_vqa(each) for each in answers]
    if len(set(plain)) > 1:
        return vqa_accuracy(answer, answers)
    return soft_accuracy(plain.count(_strip_vqa(answer)), len(plain))


def soft_accuracy(matches: int, people: int) -> float:
    """The soft accuracy of an answer that `matches` of the `people` gave; see `vqa_accuracy`."""
    if people < 2:
        return float(matches)
    # Leaving out one who agrees takes a match away; leaving out one who does not takes none.
    return (matches * min(1.0, (matches - 1) / 3) + (people - matches) * min(1.0, matches / 3)) / people


def vqa_reward(answer: str, answers: Sequence[str]) -> float:
    """`vqa_accuracy` divided by that of the best of the people's answers, so a reward of 1 can always be earned.

    An answer that is empty after normalisation ("the", "?") earns 0, unless a person gave the same characters.

    >>> vqa_reward("two", ["2", "2", "3"]), vqa_reward("", ["A"]), vqa_reward("A", ["A"])
    (1.0, 0.0, 1.0)
    """
    given = [_compared(each) for each in answers]
    best = max(soft_accuracy(given.count(each), len(given)) for each in given)
    return soft_accuracy(given.count(_compared(answer)), len(given)) / best


def _compared(answer: str) -> str:
    return normalise_vqa(answer) or f"only {answer.strip().lower()!r}"


def edit_distance(first: str, second: str) -> int:
    """Levenshtein distance: the smallest number of characters to insert, delete or replace."""
    if len(first) < len(second):
        first, second = second, first
    row = list(range(len(second) + 1))
    for number, character in enumerate(first, start=1):
        above, row[0] = row[0], number
        for at, other in enumerate(second, start=1):
            above, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, above + (character != other))
    return row[-1]


def anls(answer: str, references: Iterable[str]) -> float:
    """Average normalised Levenshtein similarity (ANLS) of one answer (arXiv 1905.13648).

    It is the maximum over the references of 1 − distance / length of the longer text, and 0 if that is below .5. The
    details follow the benchmark's own script: the distance is between lower-cased texts with white space collapsed, but
    the lengths are of the texts in upper case with their white space (the answer's ends are stripped).
    """
    stripped = answer.strip()
    return _anls(answer, references, lambda reference: max(len(reference.upper()), len(stripped.upper())))


def strict_anls(answer: str, references: Iterable[str]) -> float:
    """ANLS with the lengths of the compared texts, never above `anls`; use it as a reward.

    In `anls`, white space, and letters that are longer in upper case, make a wrong answer longer and so more similar.
    """
    given = list(references)
    compared = _anls(answer, given, lambda reference: max(len(_collapse(reference)), len(_collapse(answer))))
    return min(compared, anls(answer, given))


def _anls(answer: str, references: Iterable[str], length_with: Callable[[str], int]) -> float:
    best = 0.0
    for reference in references:
        first, second, length = _collapse(reference), _collapse(answer), length_with(reference)
        if length == 0:
            return 1.0
        if 2 * abs(len(first) - len(second)) <= length:
            best = max(best, 1 - edit_distance(first, second) / length)
    return best if best >= 0.5 else 0.0


def _collapse(text: str) -> str:
    return " ".join(text.lower().split())


def relaxed_accuracy(answer: str, reference: str, tolerance: float = 0.05) -> float:
    """1.0 if two numbers differ by at most `tolerance` · |reference|, or two texts are equal apart from case; else 0.0.

    This is the measure of ChartQA (arXiv 2203.10244), with numbers read as in lmms-eval: Python's float must accept
    them, and a percent sign divides by 100. The reference 0 must be met exactly.

    >>> relaxed_accuracy("104.9", "100"), relaxed_accuracy("5%", "0.05"), relaxed_accuracy("0.0", "0")
    (1.0, 1.0, 0.0)
    """
    answer, reference = answer.strip(), reference.strip()
    number, target = _percent_or_number(answer), _percent_or_number(reference)
    if number is not None and target:
        return float(abs(number - target) / abs(target) <= tolerance)
    return float(answer.lower() == reference.lower())


def _percent_or_number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
