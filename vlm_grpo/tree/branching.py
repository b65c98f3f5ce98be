"""Thoughts that branch where a sentence ends: the options, finding sentence ends, and numbering the segments.

Letters: K thoughts per prompt, B branches per branching point, M answers per thought, V size of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from vlm_grpo.common.options import Range


@dataclass
class BranchingConfig:
    """Where thoughts branch on their way."""

    ROOM = "rollout"

    # Levels of segments below the prompt. 2: thoughts and answers; 3: a thought is branched once on its way, where its
    # first sentence ends; 4: each of its branches once more, and so on. The advantage of each piece of a thought is
    # then relative to the pieces that begin where it does
    num_levels: Annotated[int, Range(at_least=2)] = 2
    # In how many ways a thought goes on from where it is branched; needs num_levels of 3 or more
    num_branches: Annotated[int, Range(at_least=2)] = 2
    # Tokens that a piece of a thought has at least before it may be branched; needs num_levels of 3 or more
    min_branch_length: Annotated[int, Range(at_least=1)] = 1


BLANK, WORDS, DIGIT, END = range(4)
"""States of a text: no letter or digit yet; has one; ends in a digit; ends a sentence."""

MARKS = frozenset(".!?\u3002\uff01\uff1f")  # the last three are Chinese and Japanese
CLOSERS = frozenset("\"')]}\u201d\u2019\u00bb\uff09\uff3d\u3011\u300d\u300f")  # closing quotes and brackets
CUT = "\ufffd"  # how a token is decoded that holds only some bytes of a character


class SentenceEnds:
    """Finds the ends of sentences in a stream of tokens, without looking ahead.

    A sentence contains a letter or a digit. It ends with its line, or with one of MARKS and the CLOSERS that follow it.
    A full stop after a digit does not end a sentence, since it may be a decimal point. `table[s][v]` is the state after
    token v in state s; a text begins in state BLANK.

    >>> ends = SentenceEnds(["\\n", "It is 3", ".", "5 m", ')."', " Then"])
    >>> states = [BLANK]
    >>> for token in range(6):
    ...     states.append(ends.table[states[-1]][token])
    >>> [state == END for state in states[1:]]
    [False, False, False, False, True, False]
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.table = [[_after(state, text) for text in texts] for state in range(4)]


def _after(state: int, text: str) -> int:
    for character in text:
        if character.isdigit():
            state = DIGIT
        elif character.isalnum() or character == CUT:
            state = WORDS
        elif state == BLANK or (state == END and (character.isspace() or character in CLOSERS)):
            continue
        elif character == "\n" or (character in MARKS and not (character == "." and state == DIGIT)):
            state = END
        else:
            state = WORDS
    return state


def sentence_ends(tokenizer: Any, vocabulary: int) -> SentenceEnds:
    """The sentence ends of a tokenizer. `vocabulary` is the size of the model's head; its unused ids are empty text."""
    texts = token_texts(tokenizer)
    return SentenceEnds(texts + [""] * (vocabulary - len(texts)))


def token_texts(tokenizer: Any) -> list[str]:
    """The text that each token of the vocabulary adds to a decoded text; empty for special tokens."""
    count = len(tokenizer)
    names = tokenizer.convert_ids_to_tokens(range(count))
    texts = tokenizer.batch_decode(
        [[i] for i in range(count)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # decoding with a SentencePiece tokenizer strips the leading space
    return [
        f" {text}" if name and name.startswith("▁") and not text.startswith(" ") else text
        for name, text in zip(names, texts, strict=True)
    ]


class FullTree:
    """Numbers the segments of a tree whose thoughts all branch as often as possible.

    The prompt is 0; the thoughts follow, depth by depth, and then the answers. If a thought ends before it branches,
    the segments of the thoughts below it stay empty, and its answers take the numbers below the first of these. The
    tree rule is unaffected, since an empty segment has no tokens.

    >>> tree = FullTree(num_thoughts=2, num_branches=2, num_levels=3, num_answers=1)
    >>> tree.parents
    [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    >>> tree.branches(0), tree.branches(2), tree.branches(5), tree.answers(5), tree.answers(2)
    (range(1, 3), range(5, 7), range(0, 0), range(9, 10), range(9, 10))
    """

    def __init__(self, num_thoughts: int, num_branches: int, num_levels: int, num_answers: int) -> None:
        self.parents = [-1]
        self._below: list[range] = []  # children of the prompt and of each thought
        deepest = range(1)  # segments of the greatest depth so far
        for count in (num_thoughts, *[num_branches] * (num_levels - 2), num_answers):
            self._first_of_last = deepest.start
            for segment in deepest:
                self._below.append(range(len(self.parents), len(self.parents) + count))
                self.parents += [segment] * count
            deepest = range(deepest.stop, len(self.parents))

    def branches(self, segment: int) -> range:
        """The thoughts that begin at the end of this thought or prompt; empty for the deepest thoughts."""
        return self._below[segment] if segment < self._first_of_last else range(0)

    def answers(self, thought: int) -> range:
        """The answers that begin at the end of this thought."""
        while self.branches(thought):
            thought = self.branches(thought)[0]
        return self._below[thought]
