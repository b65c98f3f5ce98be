"""Thoughts that branch on their way, where a sentence ends: the options, the ends, and the numbers of segments.

Letters: K thoughts of a prompt, B branches, M answers, V vocabulary.
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
"""What a text is at: it holds no letter or digit yet; it does; it ends in a digit; it ends a sentence."""

MARKS = frozenset(".!?\u3002\uff01\uff1f")  # the last three are those of Chinese and Japanese
CLOSERS = frozenset("\"')]}\u201d\u2019\u00bb\uff09\uff3d\u3011\u300d\u300f")  # quotes and brackets, also theirs
CUT = "\ufffd"  # of a character that a token holds a part of


class SentenceEnds:
    """Finds the ends of sentences in a stream of tokens, from what has come and never from what comes next.

    A sentence holds a letter or a digit. It ends with its line, or with one of MARKS and any quotes or brackets closed
    after that; a full stop after a digit ends nothing, for it may be a decimal point. `table[s][v]` is the state after
    token v if it was s before; a text begins BLANK.

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
    """The table of a tokenizer, for a model whose head has `vocabulary` outputs, those beyond the tokenizer's empty."""
    texts = token_texts(tokenizer)
    return SentenceEnds(texts + [""] * (vocabulary - len(texts)))


def token_texts(tokenizer: Any) -> list[str]:
    """What each token of the vocabulary adds to a text; nothing for special ones."""
    count = len(tokenizer)
    names = tokenizer.convert_ids_to_tokens(range(count))
    texts = tokenizer.batch_decode(
        [[i] for i in range(count)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # decoding strips the space that a text of a SentencePiece tokenizer begins with
    return [
        f" {text}" if name and name.startswith("▁") and not text.startswith(" ") else text
        for name, text in zip(names, texts, strict=True)
    ]


class FullTree:
    """Numbers of the segments of a tree in which every thought is branched at every level: prompt 0, thoughts level by
    level, answers.

    A thought that ends before the last level leaves the thoughts below it empty, and its answers have the numbers of
    those of the first thought there: an empty segment changes nothing of who sees whom.

    >>> tree = FullTree(num_thoughts=2, num_branches=2, num_levels=3, num_answers=1)
    >>> tree.parents
    [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    >>> tree.branches(0), tree.branches(2), tree.branches(5), tree.answers(5), tree.answers(2)
    (range(1, 3), range(5, 7), range(0, 0), range(9, 10), range(9, 10))
    """

    def __init__(self, num_thoughts: int, num_branches: int, num_levels: int, num_answers: int) -> None:
        self.parents = [-1]
        self._below: list[range] = []  # of each segment but answers: those that begin at its end
        level = range(1)
        for count in (num_thoughts, *[num_branches] * (num_levels - 2), num_answers):
            self._first_of_last = level.start
            for segment in level:
                self._below.append(range(len(self.parents), len(self.parents) + count))
                self.parents += [segment] * count
            level = range(level.stop, len(self.parents))

    def branches(self, segment: int) -> range:
        """The thoughts that begin where this one, or the prompt, ends; none on the last level of thoughts."""
        return self._below[segment] if segment < self._first_of_last else range(0)

    def answers(self, thought: int) -> range:
        """The answers that begin where this thought ends."""
        while self.branches(thought):
            thought = self.branches(thought)[0]
        return self._below[thought]
