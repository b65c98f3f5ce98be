"""The data of a rollout: a prompt, K thoughts, and M answers to each thought.

Letters: P, T, F, A tokens of a prompt, a thought, a bridge, an answer; K thoughts per prompt (where thoughts branch,
each piece counts); M answers per thought; R rows of rotary positions.
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
    """The unit in which a model reads and writes image coordinates. Each unit scales x and y separately."""

    RESIZED_PIXELS = "resized_pixels"  # pixels of the image as the processor resized it
    THOUSAND = "thousand"  # thousandths of the image's width and height, integers 0 to 1000
    UNIT = "unit"  # shares of the image's width and height, decimals 0 to 1


@dataclass(frozen=True)
class Prompt:
    """One question as the model's input: token ids, rotary positions, and the pixels for the image tokens."""

    sample: Sample
    text: str  # the chat text before images are expanded, for the rollout record
    ids: Int[Tensor, " P"]
    position_ids: Int[Tensor, "R P"]  # R = 3 where rotary positions have three axes, else 1
    image_block: Int[Tensor, " P"]  # index of the image a token belongs to, -1 for text
    pixels: Mapping[str, Tensor]  # arguments of the vision tower; empty without images
    original_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of each image in the data set
    resized_sizes: tuple[tuple[int, int], ...] = ()  # (width, height) of each image as the model sees it
    coordinates: CoordinateSpace | None = None  # unit of boxes and points; None: the task has no coordinates

    @property
    def next_position(self) -> int:
        """Rotary position of the first token after the prompt."""
        return int(self.position_ids.max()) + 1


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    `logprobs` are taken from the sampling distribution at its temperature, before top-p, top-k and min-p.
    """

    ids: Int[Tensor, " A"]
    logprobs: Float[Tensor, " A"]
    entropies: Float[Tensor, " A"]
    closed: bool  # ended by its closing tag or an end-of-sequence id, not by its length
    text: str  # text before the closing tag, without special tokens
    raw: str  # the whole text, with tags and special tokens


@dataclass(frozen=True)
class Thought:
    """One sampled thought and its answers. `bridge_ids` are forced after it and carry no loss.

    Where thoughts branch, a Thought is one piece of a thought. It continues the piece `parent`, if it has one. Either
    other pieces continue it, or it is the last piece and has a bridge and answers.
    """

    ids: Int[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    entropies: Float[Tensor, " T"]
    bridge_ids: Int[Tensor, " F"]
    closed: bool  # ended by its closing tag, or branched; not cut by its length
    text: str  # text of the whole thought, from its first piece to this one
    raw: str  # the same, with tags and special tokens
    answers: tuple[Answer, ...]
    parent: int = -1  # index in the tree of the thought that it continues; -1: it follows the prompt


@dataclass(frozen=True)
class RolloutTree:
    """K thoughts × M answers to one prompt. Thoughts stand in depth-first order, each before those that continue it."""

    prompt: Prompt
    thoughts: tuple[Thought, ...]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens. A thought counts once, not once per answer."""
        return sum(len(t.ids) + sum(len(a.ids) for a in t.answers) for t in self.thoughts)

    @property
    def num_answers(self) -> int:
        """Number of answers of all thoughts together."""
        return sum(len(t.answers) for t in self.thoughts)

    def pieces(self, index: int) -> tuple[Thought, ...]:
        """The pieces of the whole thought that ends with thought `index`, from the first piece to this one."""
        thought = self.thoughts[index]
        return (*(self.pieces(thought.parent) if thought.parent >= 0 else ()), thought)

    def by_answer(self, of: Callable[[Answer], Value], none: Value) -> list[list[Value]]:
        """A K × M table of `of(answer)`. The row of a thought without answers, which was branched, holds `none`."""
        width = max(len(t.answers) for t in self.thoughts)
        return [[of(a) for a in t.answers] or [none] * width for t in self.thoughts]
