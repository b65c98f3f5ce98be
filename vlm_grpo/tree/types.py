"""What a rollout is: a prompt, K thoughts, M answers of each. Data only.

Letters: P, T, A tokens of prompt, thought, answer; K thoughts per prompt, each piece of one counted where thoughts
branch; M answers per thought; R rows of rotary positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.task.interface import Sample

Value = TypeVar("Value")


class CoordinateSpace(StrEnum):
    """The unit in which a model reads and writes positions; x and y have a scale of their own in each."""

    RESIZED_PIXELS = "resized_pixels"  # pixels of the image as the processor resized it
    THOUSAND = "thousand"  # thousandths of the image's width and height, integers 0 to 1000
    UNIT = "unit"  # shares of the image's width and height, decimals 0 to 1


@dataclass(frozen=True)
class Prompt:
    """One question as the model reads it: token ids, positions and the pixels behind its image tokens."""

    sample: Sample
    text: str  # the chat text before images are expanded, for the rollout record
    ids: Int[Tensor, " P"]
    position_ids: Int[Tensor, "R P"]  # R = 3 where rotary positions have three axes, else 1
    image_block: Int[Tensor, " P"]  # index of the image a token belongs to, -1 for text
    pixels: Mapping[str, Tensor]  # arguments of the vision tower; empty without images
    original_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of each image in the data set
    resized_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of each image as the model sees it
    coordinates: CoordinateSpace | None = None  # of boxes and points in question and answers; None: there are none

    @property
    def next_position(self) -> int:
        """Rotary position of the first token after the prompt."""
        return int(self.position_ids.max()) + 1


@dataclass(frozen=True)
class Answer:
    """One sampled answer. `logprobs` are those of the distribution it was sampled from, before top-p, top-k and
    min-p.
    """

    ids: Int[Tensor, " A"]
    logprobs: Float[Tensor, " A"]
    entropies: Float[Tensor, " A"]
    closed: bool  # ended by its closing tag or an end-of-sequence id, not by its length
    text: str  # what stands before the closing tag, special tokens skipped
    raw: str  # all that was written, with tags and special tokens


@dataclass(frozen=True)
class Thought:
    """One sampled thought and the answers that grow from it. `bridge_ids` are forced after it and carry no loss.

    Where thoughts branch it is a piece of one: it may go on from another (`parent`), and either others go on from it,
    or it is the last piece and has answers and a bridge.
    """

    ids: Int[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    entropies: Float[Tensor, " T"]
    bridge_ids: Int[Tensor, " F"]
    closed: bool  # ended by its closing tag, or branched; not cut by its length
    text: str  # of the whole thought, from its first piece to this one
    raw: str  # likewise, with tags and special tokens
    answers: tuple[Answer, ...]
    parent: int = -1  # the thought that it goes on from, as an index of the tree's; -1: from the prompt


@dataclass(frozen=True)
class RolloutTree:
    """K thoughts × M answers to one prompt. Thoughts are in depth-first order: what goes on from one follows it."""

    prompt: Prompt
    thoughts: tuple[Thought, ...]

    @property
    def num_sampled(self) -> int:
        """Sampled tokens: thoughts counted once, not once per answer."""
        return sum(len(t.ids) + sum(len(a.ids) for a in t.answers) for t in self.thoughts)

    @property
    def num_answers(self) -> int:
        """Answers of all thoughts together."""
        return sum(len(t.answers) for t in self.thoughts)

    def pieces(self, index: int) -> tuple[Thought, ...]:
        """The whole thought that ends with this one: the pieces from the prompt on, this one last."""
        thought = self.thoughts[index]
        return (*(self.pieces(thought.parent) if thought.parent >= 0 else ()), thought)

    def by_answer(self, of: Callable[[Answer], Value], none: Value) -> list[list[Value]]:
        """K × M: something of each answer; `none` in the row of a thought that has no answers, for it was branched."""
        width = max(len(t.answers) for t in self.thoughts)
        return [[of(a) for a in t.answers] or [none] * width for t in self.thoughts]
