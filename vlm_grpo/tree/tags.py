"""The tags around thoughts and answers: how they are written, forced, found in a stream of tokens, and judged."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
FORMAT = "First think inside <think> </think>, then give the answer inside <answer> </answer>."
_TAG = re.compile(r"<\s{0,3}/?\s{0,3}(?:think|answer)\s{0,3}>", re.IGNORECASE)  # as parsers of answers read them


def bridge_ids(tokenizer: Any, closed: bool) -> tuple[int, ...]:
    """The forced tokens between a thought and its answers; a thought that was cut is closed first."""
    text = f"\n{ANSWER_OPEN}" if closed else f"\n{THOUGHT_CLOSE}\n{ANSWER_OPEN}"
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def response_ids(tokenizer: Any, thought: str, answer: str) -> tuple[list[int], tuple[int, ...], list[int]]:
    """Tokens of a thought, of the bridge and of an answer as a model should write them: thought and answer end with
    their closing tags, and the answer with the end-of-sequence id after its tag.
    """
    thought_ids = tokenizer.encode(thought + THOUGHT_CLOSE, add_special_tokens=False)
    answer_ids = tokenizer.encode(answer + ANSWER_CLOSE, add_special_tokens=False)
    return thought_ids, bridge_ids(tokenizer, closed=True), [*answer_ids, tokenizer.eos_token_id]


def read_ids(tokenizer: Any, ids: Sequence[int], tag: str) -> tuple[str, str]:
    """What sampled tokens say: the words before the closing tag, without special tokens, and the raw text, with all
    tags and special tokens. A tag may be a special token, and then it stands in the raw text alone.
    """
    words = tokenizer.decode(ids, skip_special_tokens=True).partition(tag)[0].strip()
    return words, tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class FormatMark:
    """How an answer and its thought were written."""

    is_right: bool  # one thought and one answer, closed
    nests_tags: bool  # the answer's text holds tags of its own


def format_mark(thought: str, answer: str) -> FormatMark:
    """The mark of an answer, from its raw text and that of its whole thought.

    >>> format_mark("It is red.</think>", "red</answer>")
    FormatMark(is_right=True, nests_tags=False)
    >>> format_mark("It is red.</think>", "<answer>red</answer>")
    FormatMark(is_right=False, nests_tags=True)
    """
    found = _TAG.findall(answer)
    is_right = _TAG.findall(thought) == [THOUGHT_CLOSE] and found == [ANSWER_CLOSE]
    return FormatMark(is_right, found[:1] not in ([], [ANSWER_CLOSE]))


class TagMatcher:
    """Finds a tag in a stream of tokens, though tokens split it or carry more than it. One table look-up per token.

    `table[s][v]` is how many characters of the tag are matched after token v if s were before; its length means found.

    >>> matcher = TagMatcher("</a>", ["x</", "a", ">!", "<"])
    >>> matcher.table[matcher.table[matcher.table[0][0]][1]][2] == matcher.found
    True
    """

    def __init__(self, tag: str, pieces: Sequence[str]) -> None:
        self.tag, self.found = tag, len(tag)
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


@dataclass(frozen=True)
class TagTables:
    """Where thoughts and answers end in a stream of tokens, and the tokens that are forced between them."""

    thought: TagMatcher
    answer: TagMatcher
    bridge: tuple[int, ...]  # after a thought that ended with its tag
    bridge_unclosed: tuple[int, ...]  # after one that did not


def tag_tables(tokenizer: Any, vocabulary: int) -> TagTables:
    """The tables of a tokenizer, for a head of `vocabulary` outputs; those beyond the tokenizer's are empty."""
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    pieces += [""] * (vocabulary - len(pieces))
    return TagTables(
        TagMatcher(THOUGHT_CLOSE, pieces),
        TagMatcher(ANSWER_CLOSE, pieces),
        bridge_ids(tokenizer, closed=True),
        bridge_ids(tokenizer, closed=False),
    )


def _automaton(tag: str) -> list[dict[str, int]]:
    """Knuth-Morris-Pratt: for each number of matched characters, where each character of the tag leads."""
    steps: list[dict[str, int]] = []
    for state in range(len(tag)):
        seen = tag[:state]
        leads = {c: max(n for n in range(state + 2) if (seen + c).endswith(tag[:n])) for c in set(tag)}
        steps.append(leads)
    return steps
