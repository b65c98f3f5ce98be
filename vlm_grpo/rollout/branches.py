"""Decoding where each branch is a row of a batch: for models whose layers carry a state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.model.attention import Fold
from vlm_grpo.model.states import States, join_states, select_states


@dataclass(frozen=True)
class Span:
    """Tokens that one branch puts into a block, side by side in its tree's row."""

    tree: int  # a number that no other tree of the rollout has
    segment: int
    lane: int  # row of the block
    first: int  # column of the first token
    count: int


@dataclass(frozen=True)
class QueryBlock:
    """The queries of one step, a row per lane, and what they see of the shared cache."""

    tokens: Int[Tensor, "R C"]
    positions: Int[Tensor, "axes R C"]
    slots: Int[Tensor, "R C"]
    seen: Bool[Tensor, "R C S"]
    distance: Int[Tensor, "R C S"] | None  # needed where layers have a window


class Branches:
    """Decodes a block with each span as a row of a batch, which goes on from the state that its branch left.

    Spans of one length are one call: single tokens, and the bridge of thoughts that ended. Attention sees the block and
    the cache that all branches share. A state is read in the step after it was written, or never, so only those are
    kept.
    """

    def __init__(self, logits: Callable[..., Tensor], cache: Any, parents: Sequence[int]) -> None:
        self.logits, self.cache, self.parents = logits, cache, parents
        self._left: list[tuple[list[tuple[int, int]], States]] = []  # by call: (tree, segment) of each row, states

    def start(self, tree: int) -> None:
        """The next forward reads the tree's prompt."""
        self._enter([(tree, 0)], States())

    def decode(self, block: QueryBlock, stop: int, spans: Sequence[Span]) -> Float[Tensor, "n V"]:
        """Logits after the last token of each of the n spans. Every slot of the block lies before `stop`."""
        rows = {branch: row for row, branch in enumerate(b for branches, _ in self._left for b in branches)}
        states = join_states([s.after for _, s in self._left])
        self._left = []
        device, order, parts = block.tokens.device, [], []
        for count in sorted({s.count for s in spans}):
            chosen = [i for i, s in enumerate(spans) if s.count == count]
            of_count = [spans[i] for i in chosen]
            branches = [(s.tree, s.segment) for s in of_count]
            sources = [self._source(rows, *branch) for branch in branches]
            self._enter(branches, States(select_states(states, torch.tensor(sources, device=device))))
            width = block.tokens.shape[1]
            at = torch.tensor([[s.lane * width + s.first + i for i in range(count)] for s in of_count], device=device)
            take = torch.zeros(block.tokens.numel(), dtype=torch.long, device=device)
            take[at] = torch.arange(at.numel(), device=device).view_as(at)
            self.cache.write_block(block.slots.flatten()[at], stop, lanes=at // width)
            out = self.logits(
                block.tokens.flatten()[at],
                block.positions.flatten(1)[:, at],
                block.seen,
                block.distance,
                self.cache,
                torch.tensor([count - 1], device=device),
                fold=Fold(take.view_as(block.tokens), at),
            )
            order.extend(chosen)
            parts.append(out[:, 0])
        return torch.cat(parts)[torch.tensor(order, device=device).argsort()]

    def _source(self, rows: Mapping[tuple[int, int], int], tree: int, segment: int) -> int:
        """A branch that begins has left no state yet, so it goes on from the nearest ancestor's that has tokens."""
        while (tree, segment) not in rows:
            assert segment > 0, f"nothing of tree {tree} came in the step before"
            segment = self.parents[segment]
        return rows[tree, segment]

    def _enter(self, branches: list[tuple[int, int]], states: States) -> None:
        self.cache.states = states
        self._left.append((branches, states))
