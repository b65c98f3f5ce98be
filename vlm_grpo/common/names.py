"""Suggests the known name that a misspelt name probably means."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`; None if no similarity reaches `cutoff` (from 0 to 1, where 1 is equal).

    >>> nearest("num_thougths", ["num_answers", "num_thoughts"])
    'num_thoughts'
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence to append to an error message, with its leading space; empty if no known name is similar.

    >>> did_you_mean("spilt", ["split", "model"])
    " Did you mean 'split'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""
