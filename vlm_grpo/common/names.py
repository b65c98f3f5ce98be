"""The known name that a misspelt one comes nearest to."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of the known names; None if none is similar by at least `cutoff`, where 1 is equal.

    >>> nearest("num_thougths", ["num_answers", "num_thoughts"])
    'num_thoughts'
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence to put after a message, with a space before it; empty if no known name is near.

    >>> did_you_mean("spilt", ["split", "model"])
    " Did you mean 'split'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
