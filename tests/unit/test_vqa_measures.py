"""Measures of visual question answering: published cases, and the formulas written anew on random inputs."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

from vlm_grpo.scoring import (
    anls,
    edit_distance,
    exact_match,
    normalise_vqa,
    official_vqa_accuracy,
    relaxed_accuracy,
    soft_accuracy,
    strict_anls,
    vqa_accuracy,
)

CASES = Path(__file__).parents[1] / "cases"


def cases(name):
    rows = [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]
    return [pytest.param(row, id=f"{index}-{name}") for index, row in enumerate(rows)]


# ---- published cases ----


@pytest.mark.parametrize("row", cases("vqa_accuracy"))
def test_vqa_accuracy_equals_the_official_one(row):
    assert official_vqa_accuracy(row["answer"], row["answers"]) == pytest.approx(row["score_py3"], abs=1e-12)
    assert normalise_vqa(row["answer"]) == row["normalised_py3"]


@pytest.mark.parametrize("row", cases("anls"))
def test_anls_equals_the_published_one(row):
    published = row["anls_lmms_pipeline"]
    assert anls(row["prediction"], row["answers"]) == pytest.approx(published, abs=1e-12)
    assert strict_anls(row["prediction"], row["answers"]) <= published + 1e-12


@pytest.mark.parametrize("row", cases("chartqa_relaxed"))
def test_relaxed_accuracy_equals_the_published_one(row):
    assert relaxed_accuracy(row["prediction"], row["answer"]) == row["relaxed_lmms_pipeline"]


# ---- the formulas, written out anew in another style ----

# Words and what the official table makes of them; None where it leaves them alone
IRREGULAR = {
    "couldn'tve": "couldn't've", "couldnt've": "couldn't've", "hed've": "he'd've", "ow's'at": "'ow's'at",
    "'ows'at": "'ow's'at", "'ow'sat": "'ow's'at", "somebody'd": "somebodyd", "somebodyd've": "somebody'd've",
    "yall'll": "y'all'll", "y'allll": "y'all'll", "yall'd've": "y'all'd've", "y'alld've": "y'all'd've",
    "y'all'dve": "y'all'd've", "twas": "'twas", "oclock": "o'clock", "maam": "ma'am", "youve": "you've",
    "theyre": "they're", "wont": "won't", "dont": "don't", "doesnt": "doesn't", "whos": "who's", "hes": "he's",
    "itll": "it'll", "notve": "not've", "somethingd've": "something'd've", "someones": "someone's",
    "somebodys": "somebody's", "wheres": "where's", "couldntve": None, "let's": None, "lets": None, "she's": None,
    "shes": None, "im": None, "ive": None, "id've": None, "ill": None, "wed": None, "well": None, "were": None,
    "its": None, "somethings": None, "wherere": None,
}  # fmt: skip


def test_contractions_are_those_of_the_official_table():
    for word, expected in IRREGULAR.items():
        assert normalise_vqa(word) == (word if expected is None else expected), word


@cache
def independent_normal(text):
    """Normalisation as a chain of steps on a list of characters and words, with its own word tables."""
    text = "".join(" " if character in "\n\t" else character for character in text).strip()
    squeeze = re.search("[0-9],[0-9]", text) is not None
    out = []
    for character in text:
        if character in set(';/[]"{}()=+\\_-><@`,?!'):
            near = (character + " ") in text or (" " + character) in text
            out.append("" if squeeze or near else " ")
        else:
            out.append(character)
    text, kept, deleted = "".join(out), [], 0
    for at, character in enumerate(text):
        if character == "." and deleted < 32 and not text[at + 1 : at + 2].isdigit():
            deleted += 1
        else:
            kept.append(character)
    digits = dict(none="0", zero="0", one="1", two="2", three="3", four="4", five="5", six="6", seven="7", eight="8")
    digits |= dict(nine="9", ten="10")
    words = [digits.get(word, word) for word in "".join(kept).lower().split()]
    words = [word for word in words if word not in ("a", "an", "the")]
    return " ".join(IRREGULAR.get(word) or word for word in words)


def independent_accuracy(answer, answers):
    """The double loop of the definition."""
    total = 0.0
    for left_out in range(len(answers)):
        agreeing = sum(1 for at, other in enumerate(answers) if at != left_out and other == answer)
        total += min(1.0, agreeing / 3)
    return total / len(answers)


WORDS = [
    *("yes", "no", "Yes.", "2", "two", "none", "a", "the", "an dog", "red/blue", "red, blue", "1,000", "1, 000", "1.5"),
    *("..", ".", "3.", ".5", "it's", "-", "- -", "top-left", "(x)", "[ x ]", "\nx\t", "  ", "", "é", "TEN ten", "it's"),
    *IRREGULAR,
]


@pytest.mark.slow
def test_vqa_accuracy_equals_an_independent_one_on_random_answers():
    rng = random.Random(5)
    for _ in range(1200):
        pool = [
            rng.choice(["-", " ", "  ", "\t", ", "]).join(rng.choices(WORDS, k=rng.randint(1, 3)))
            for _ in range(rng.randint(1, 4))
        ]
        answers = [rng.choice(pool) for _ in range(10)]
        answer = rng.choice([*pool, rng.choice(WORDS)])
        normal = [independent_normal(each) for each in answers]
        assert [normalise_vqa(each) for each in pool] == [independent_normal(each) for each in pool]
        always = independent_accuracy(independent_normal(answer), normal)
        assert vqa_accuracy(answer, answers) == pytest.approx(always, abs=1e-12)
        plain = [each.replace("\n", " ").replace("\t", " ").strip() for each in [answer, *answers]]
        official = always if len(set(plain[1:])) > 1 else independent_accuracy(plain[0], plain[1:])
        assert official_vqa_accuracy(answer, answers) == pytest.approx(official, abs=1e-12)


def test_soft_accuracy_by_hand():
    assert [soft_accuracy(matches, 10) for matches in range(6)] == pytest.approx([0, 0.3, 0.6, 0.9, 1, 1])
    assert soft_accuracy(1, 1) == 1 and soft_accuracy(0, 1) == 0


def test_official_accuracy_normalises_nothing_where_all_agree():
    assert official_vqa_accuracy("Yes", ["yes"] * 10) == 0.0 and vqa_accuracy("Yes", ["yes"] * 10) == 1.0
    assert official_vqa_accuracy("Yes", ["yes"] * 9 + ["no"]) == 1.0
    assert official_vqa_accuracy(" yes\n", ["yes "] * 10) == 1.0


@cache
def recursive_distance(first, second):
    if not first or not second:
        return len(first) + len(second)
    if first[0] == second[0]:
        return recursive_distance(first[1:], second[1:])
    return 1 + min(
        recursive_distance(first[1:], second),
        recursive_distance(first, second[1:]),
        recursive_distance(first[1:], second[1:]),
    )


@pytest.mark.slow
def test_anls_equals_an_independent_one_on_random_texts():
    rng = random.Random(6)
    letters = "abAB  ß.é\tİ"
    for _ in range(1500):
        texts = ["".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(rng.randint(1, 3))]
        answer = "".join(rng.choices(letters, k=rng.randint(0, 6)))
        if rng.random() < 0.5:
            answer = texts[0][: rng.randint(0, 8)] + rng.choice(["", "a", " B"])
        worst = []
        for text in texts:
            first, second = (re.sub(r"\s+", " ", each.strip().lower()) for each in (text, answer))
            assert edit_distance(first, second) == edit_distance(second, first) == recursive_distance(first, second)
            longer = max(len(text.upper()), len(answer.strip().upper()))
            worst.append(recursive_distance(first, second) / longer if longer else 0.0)
        similarity = 1 - min(worst)
        assert anls(answer, texts) == pytest.approx(similarity if similarity >= 0.5 else 0.0, abs=1e-12)
        assert strict_anls(answer, texts) <= anls(answer, texts)


@pytest.mark.slow
def test_relaxed_accuracy_equals_an_independent_one_on_random_numbers():
    rng = random.Random(7)
    for _ in range(6000):
        target = round(rng.uniform(-200, 200), rng.randint(0, 3))
        given = target * rng.choice([1, 1.05, 0.95, 1.0499, 1.0501, -1, 2]) + rng.choice([0, 0, 0.001])
        percent = (rng.random() < 0.3, rng.random() < 0.3)
        texts = [f"{value:g}{'%' * sign}" for value, sign in zip((given, target), percent, strict=True)]
        numbers = [float(text.strip("%")) / (100.0 if "%" in text else 1.0) for text in texts]
        if numbers[1] == 0:
            expected = texts[0] == texts[1]
        else:
            expected = not abs(numbers[0] - numbers[1]) / abs(numbers[1]) > 0.05
        assert relaxed_accuracy(f" {texts[0]}\n", texts[1]) == float(expected), texts


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("1_000", "1000", 1),  # float() takes it, as lmms-eval does
        ("1,000", "1000", 0),
        ("0", "0", 1),
        ("0.0", "0", 0),
        ("0%", "0%", 1),
        ("inf", "inf", 0),
        ("nan", "5", 0),
        ("%", "%", 1),
        ("Café", "CAFÉ", 1),
        ("105.0001", "100", 0),
        ("-100", "100", 0),
        ("5%%", "5%", 1),
    ],
)
def test_relaxed_accuracy_at_its_edges(answer, reference, right):
    assert relaxed_accuracy(answer, reference) == right


def test_exact_match_ignores_case_and_surrounding_space_only():
    assert [exact_match(text, ["Dark brown"]) for text in ("dark BROWN ", "darkbrown", "dark")] == [1, 0, 0]
    assert exact_match("x", []) == 0.0
