"""The tags around thoughts and answers: writing them, forcing them, finding them in a token stream, checking them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
FORMAT = "First think inside <think> </think>, then give the answer inside <answer> </answer>."
_TAG = re.compile(r"<\s{0,3}/?\s{0,3}(?:think|answer)\s{0,3}>", re.IGNORECASE)  # as parsers of answers read them


def bridge_ids(tokenizer: Any, closed: bool) -> tuple[int, ...]:
    """The tokens that are forced between a thought and its answers.

    They begin with the closing tag if the thought was cut before writing one (`closed` is false).
    """
    text = f"\n{ANSWER_OPEN}" if closed else f"\n{THOUGHT_CLOSE}\n{ANSWER_OPEN}"
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def response_ids(tokenizer: Any, thought: str, answer: str) -> tuple[list[int], tuple[int, ...], list[int]]:
    """The ids of a well-formed response: those of the thought, of the forced bridge, and of the answer.

    Thought and answer end with their closing tags; the end-of-sequence id follows the answer's tag.
    """
    thought_ids = tokenizer.encode(thought + THOUGHT_CLOSE, add_special_tokens=False)
    answer_ids = tokenizer.encode(answer + ANSWER_CLOSE, add_special_tokens=False)
    return thought_ids, bridge_ids(tokenizer, closed=True), [*answer_ids, tokenizer.eos_token_id]


def read_ids(tokenizer: Any, ids: Sequence[int], tag: str) -> tuple[str, str]:
    """Decode sampled tokens to (text, raw).

    `text` ends before the closing `tag` and has no special tokens. `raw` keeps all tags and special tokens. A tag that
    is itself a special token appears in `raw` only.
    """
    words = tokenizer.decode(ids, skip_special_tokens=True).partition(tag)[0].strip()
    return words, tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class FormatMark:
    """Whether an answer and its thought keep the format."""

    is_right: bool  # one thought and one answer, closed
    nests_tags: bool  # the answer's text holds tags of its own


def format_mark(thought: str, answer: str) -> FormatMark:
    """Check the format of an answer, from the raw text of its whole thought and its own.

    >>> format_mark("It is red.</think>", "red</answer>")
    FormatMark(is_right=True, nests_tags=False)
    >>> format_mark("It is red.</think>", "<answer>red</answer>")
    FormatMark(is_right=False, nests_tags=True)
    """
    found = _TAG.findall(answer)
    is_right = _TAG.findall(thought) == [THOUGHT_CLOSE] and found == [ANSWER_CLOSE]
    return FormatMark(is_right, found[:1] not in ([], [ANSWER_CLOSE]))


class TagMatcher:
    """Finds a tag in a stream of tokens with one table look-up per token.

    A tag may span several tokens, and a token may hold text besides the tag. The state is the number of the tag's
    characters that are matched so far; `table[s][v]` is the state after token v in state s. In state `found`, the
    tag's length, the tag is complete.

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
    """Matchers for the ends of thoughts and answers, and the tokens that are forced between them."""

    thought: TagMatcher
    answer: TagMatcher
    bridge: tuple[int, ...]  # after a thought that ended with its tag
    bridge_unclosed: tuple[int, ...]  # after a thought that was cut


def tag_tables(tokenizer: Any, vocabulary: int) -> TagTables:
    """The tables of a tokenizer. `vocabulary` is the size of the model's head; its unused ids are empty text."""
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    pieces += [""] * (vocabulary - len(pieces))
    return TagTables(
        TagMatcher(THOUGHT_CLOSE, pieces),
        TagMatcher(ANSWER_CLOSE, pieces),
        bridge_ids(tokenizer, closed=True),
        bridge_ids(tokenizer, closed=False),
    )


def _automaton(tag: str) -> list[dict[str, int]]:
    """The Knuth-Morris-Pratt automaton: the next state for each state and each character of the tag."""
    steps: list[dict[str, int]] = []
    for state in range(len(tag)):
        seen = tag[:state]
        leads = {c: max(n for n in range(state + 2) if (seen + c).endswith(tag[:n])) for c in set(tag)}
        steps.append(leads)
    return steps
