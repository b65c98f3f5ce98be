"""The tags around thoughts and answers, and how one is found in a stream of tokens."""

from collections.abc import Sequence
from typing import Any

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
FORMAT = "First think inside <think> </think>, then give the answer inside <answer> </answer>."


def bridge_ids(tokenizer: Any, closed: bool) -> tuple[int, ...]:
    """The forced tokens between a thought and its answers; a thought that was cut is closed first."""
    text = f"\n{ANSWER_OPEN}" if closed else f"\n{THOUGHT_CLOSE}\n{ANSWER_OPEN}"
    return tuple(tokenizer.encode(text, add_special_tokens=False))


class TagMatcher:
    """Finds a tag in a stream of tokens, though tokens split it or carry more than it. One table look-up per token.

    `table[s][v]` is how many characters of the tag are matched after token v if s were before; its length means found.

    >>> matcher = TagMatcher("</a>", ["x</", "a", ">!", "<"])
    >>> matcher.table[matcher.table[matcher.table[0][0]][1]][2] == matcher.found
    True
    """

    def __init__(self, tag: str, pieces: Sequence[str]) -> None:
        self.found = len(tag)
        steps = _automaton(tag)
        self.table: list[list[int]] = []
        for state in range(len(tag)):
            # After the first state a token differs only if its first character goes on with the tag
            row = self.table[0].copy() if state else [0] * len(pieces)
            for token, piece in enumerate(pieces):
                if not piece:
                    row[token] = state
                if not piece or (state and piece[0] != tag[state]):
                    continue
                matched = state
                for character in piece:
                    matched = steps[matched].get(character, 0)
                    if matched == self.found:
                        break
                row[token] = matched
            self.table.append(row)


def _automaton(tag: str) -> list[dict[str, int]]:
    """Knuth-Morris-Pratt: for each number of matched characters, where each character of the tag leads."""
    steps: list[dict[str, int]] = []
    for state in range(len(tag)):
        seen = tag[:state]
        leads = {c: max(n for n in range(state + 2) if (seen + c).endswith(tag[:n])) for c in set(tag)}
        steps.append(leads)
    return steps
