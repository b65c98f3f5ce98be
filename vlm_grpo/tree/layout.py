"""The layout of a packed row: where its branches lie, in the form that each attention backend needs.

Parents and lengths of the segments determine everything, for trees of any depth. Letters: S segments, N packed
positions; for the e segments of one depth: L query tokens, C gathered keys, e + 1 bounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from vlm_grpo.tree.pack import ancestors


@dataclass(frozen=True)
class Block:
    """Queries [start, stop) of a row, which see only keys in [start, stop) and in their root [root, root_stop)."""

    root: int
    root_stop: int
    start: int
    stop: int


def row_blocks(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Block, ...]:
    """The row cut into blocks: each root, and each child of a root with its whole subtree. Empty blocks are left out.

    Segments stand in the depth-first order of `pack`. A query sees no key outside its block, so attention skips all
    other pairs: in a row of many branches, most of them.

    >>> [(b.root, b.root_stop, b.start, b.stop) for b in row_blocks([-1, 0, 1, 0, -1], [5, 2, 1, 2, 4])]
    [(0, 0, 0, 5), (0, 5, 5, 8), (0, 5, 8, 10), (10, 10, 10, 14)]
    """
    blocks: list[Block] = []
    position = root = root_stop = 0
    for segment, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        end = position + length
        if parent < 0:
            root, root_stop = position, end
            blocks.append(Block(position, position, position, end))
        elif parents[parent] < 0:
            blocks.append(Block(root, root_stop, position, end))
        else:
            assert parent < segment and blocks[-1].stop == position, "segments are not in depth-first order"
            blocks[-1] = Block(root, root_stop, blocks[-1].start, end)
        position = end
    return tuple(b for b in blocks if b.stop > b.start)


def additive(seen: Bool[Tensor, "*n"], dtype: torch.dtype) -> Float[Tensor, "*n"]:
    """A mask to add to attention logits: 0 where `seen` is true, else -∞."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class Level:
    """The segments of one depth as one variable-length attention call, causal and aligned to the bottom right.

    A segment's keys are the tokens of its ancestors and its own, in the order of the path. A query and a key are
    therefore as far apart in the keys as on the path, so a sliding window counts tokens along the branch.
    """

    queries: Int[Tensor, " L"]  # packed positions of the segments' tokens
    keys: Int[Tensor, " C"]  # packed positions of the keys, segment by segment
    query_bounds: Int32[Tensor, " e"]  # the start of each segment's queries, then the end of the last
    key_bounds: Int32[Tensor, " e"]
    max_queries: int  # of one segment
    max_keys: int


def row_levels(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Level, ...]:
    """One Level for each depth of the row, roots first. Segments without tokens are left out.

    >>> root, leaves = row_levels([-1, 0, 0], [2, 1, 2])
    >>> leaves.queries.tolist(), leaves.keys.tolist(), leaves.key_bounds.tolist()
    ([2, 3, 4], [0, 1, 2, 0, 1, 3, 4], [0, 3, 7])
    """
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    own = [torch.arange(*bounds) for bounds in pairwise(starts)]
    seen: list[Tensor] = []  # packed positions on the path from the root to the end of each segment
    depths: list[int] = []
    for parent, positions in zip(parents, own, strict=True):
        seen.append(positions if parent < 0 else torch.cat([seen[parent], positions]))
        depths.append(0 if parent < 0 else depths[parent] + 1)
    levels = []
    for depth in range(max(depths) + 1):
        of_level = [s for s, d in enumerate(depths) if d == depth and lengths[s] > 0]
        if of_level:
            levels.append(_level([own[s] for s in of_level], [seen[s] for s in of_level]))
    return tuple(levels)


def _level(queries: list[Tensor], keys: list[Tensor]) -> Level:
    def bounds(parts: list[Tensor]) -> Tensor:
        return torch.tensor([0, *map(len, parts)]).cumsum(0).int()

    longest = max(map(len, queries)), max(map(len, keys))
    return Level(torch.cat(queries), torch.cat(keys), bounds(queries), bounds(keys), *longest)


@dataclass(frozen=True)
class TreeLayout:
    """One packed row, shared by all layers. The form that an attention backend needs is built on first use."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens of each segment
    segment: Int[Tensor, " N"]
    path: Int[Tensor, " N"]
    image_block: Int[Tensor, " N"] | None = None  # set if an image's tokens also see its later tokens
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)
    _biases: dict[tuple[int | None, int, torch.dtype], tuple[Tensor, ...]] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """For `sdpa`: the parts of the dense mask that contain visible pairs."""
        return row_blocks(self.parents, self.lengths)

    def block_biases(self, window: int | None, groups: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """For `sdpa`: one additive mask of 0 and -∞ for each block, of shape (1, 1, groups·L, root + L).

        L is the number of queries of the block. They are repeated for each of the `groups` query heads that share a
        key head.
        """
        key = window, groups, dtype
        if key not in self._biases:
            rule = self.rule(window)
            nothing = torch.zeros((), dtype=torch.long, device=self.segment.device)
            row = torch.arange(len(self.segment), device=self.segment.device)
            biases = []
            for b in self.blocks:
                queries, keys = row[b.start : b.stop], torch.cat([row[b.root : b.root_stop], row[b.start : b.stop]])
                seen = rule(nothing, nothing, queries[:, None], keys[None]).repeat(groups, 1)
                biases.append(additive(seen, dtype)[None, None])
            self._biases[key] = tuple(biases)
        return self._biases[key]

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """For `flash`: one attention call for each depth.

        The kernel is causal, so the row must not have an `image_block`.
        """
        assert self.image_block is None, "a variable-length kernel cannot let tokens of an image see later ones"
        device = self.segment.device

        return tuple(
            replace(level, **{k: v.to(device) for k, v in vars(level).items() if isinstance(v, Tensor)})
            for level in row_levels(self.parents, self.lengths)
        )

    @cached_property
    def by_level(self) -> Int[Tensor, " N"]:
        """Packed positions, ordered as the queries of all levels together."""
        return torch.cat([level.queries for level in self.levels])

    @cached_property
    def from_levels(self) -> Int[Tensor, " N"]:
        """The inverse of `by_level`."""
        return self.by_level.argsort()

    def block_mask(self, window: int | None) -> BlockMask:
        """For `flex`: which blocks of the mask contain visible pairs, and the rule for partly visible blocks."""
        if window not in self._masks:
            length = len(self.segment)
            rule, device = self.rule(window), self.segment.device
            self._masks[window] = create_block_mask(rule, None, None, length, length, device=device)
        return self._masks[window]

    def rule(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The tree rule as FlexAttention's mask function: (row, head, query, key) → whether the query sees the key."""
        segment, path = self.segment, self.path
        table: Bool[Tensor, "S S"] = ancestors(self.parents).to(segment.device)
        image = torch.full_like(segment, -1) if self.image_block is None else self.image_block
        # a tensor: a number would be compiled in
        limit = torch.tensor(len(segment) if window is None else window, device=segment.device)
        # a lambda: FlexAttention counts its parameters, and shape checks would wrap a function
        return lambda row, head, query, key: (
            (
                (table[segment[query], segment[key]] & (path[query] >= path[key]))
                | ((image[query] == image[key]) & (image[query] >= 0))
            )
            & (path[query] - path[key] < limit)
        )
