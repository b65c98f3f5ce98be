"""Small problems to try a task without data: sums in words, and functions with tests."""

import random
from typing import Any


def make_sum(split: str, index: int) -> dict[str, str]:
    """A sum of two digits as a row of GSM8K. No ordered pair of digits is in more than one split.

    >>> make_sum("val", 0)["answer"].count("####")
    1
    """
    fifth = {"val": 0, "test": 1}.get(split)
    pairs = [
        (a, b)
        for a in range(10)
        for b in range(10)
        if fifth == (a + 2 * b) % 5 or (fifth is None and (a + 2 * b) % 5 > 1)
    ]
    a, b = random.Random(f"{split}-{index}").choice(pairs)
    return {"question": f"{a} and {b}?", "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}


def examples(split: str) -> list[dict[str, Any]]:
    """Exercises for functions of one number, such as "twice x plus 3"; splits are disjoint, unknown splits empty."""
    counts = {"train": 96, "val": 24, "test": 24}
    if split not in counts:
        return []
    every = [(a, b) for a in range(12) for b in range(12)]
    random.Random(0).shuffle(every)
    start = list(counts).index(split)
    first = sum(list(counts.values())[:start])
    rows = []
    for a, b in every[first : first + counts[split]]:
        tests = [f"assert f({x}) == {a * x + b}" for x in (0, 1, 2, 5)]
        question = f"Write f(x), which gives {a} times x plus {b}."
        reference = f"def f(x):\n    return {a} * x + {b}"
        rows.append({"id": f"{split}-{a}-{b}", "question": question, "tests": tests, "reference": reference})
    return rows
