"""Runs a packed row depth by depth (prompts, thoughts, answers) for models with linear-attention layers.

Linear-attention layers read a sequence in order and keep a state, so siblings cannot share a packed row. Here siblings
are rows of a batch, and each starts from its parent's state. Layers with full attention see keys and values that exist
once per token, under the tree rule. No token is computed twice. Nothing is changed in place, so that gradients flow
through the cache, and layers can be recomputed in the backward pass.

Letters: B segments of a batch, L tokens of each, padding included, R rows and C queries per row of the folded grid, S
keys, N packed positions, H heads, D head size, k kernel size of the convolution.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlm_grpo.model.attention import Fold
from vlm_grpo.model.states import LayerState, StateCache, States, join_states, select_states
from vlm_grpo.tree.pack import ancestors, visible

PADDING = 0.25  # how much shorter than a batch's longest segment the others may be, as a share


@dataclass(frozen=True)
class LevelBatch:
    """Segments of one depth that run as one batch.

    A packed position is an index into the packed row, a slot an index into the tokens in the order in which they run.
    Each row of the folded grid belongs to one parent: its queries are the tokens of the parent's children in the batch,
    its keys are the tokens from the root to the parent and those of these children.
    """

    tokens: Int[Tensor, "B L"]  # packed positions; padding repeats a token
    lengths: Int[Tensor, " B"] | None  # tokens of each segment; None if there is no padding
    sources: Int[Tensor, " B"] | None  # each segment's parent, a row of the depth above; None for a prompt
    fold: Fold | None  # None for a prompt, which sees only itself
    keys: Int[Tensor, "R S"]  # slots
    seen: Bool[Tensor, "R C S"]
    distance: Int[Tensor, "R C S"]


@dataclass(frozen=True)
class LevelPlan:
    """The batches in which a packed row runs, depth by depth from the prompts on."""

    levels: tuple[tuple[LevelBatch, ...], ...]
    slots: Int[Tensor, " N"]  # each packed position's slot

    def to(self, device: torch.device) -> "LevelPlan":
        """The same plan with its tensors on `device`."""
        return LevelPlan(tuple(tuple(_to(b, device) for b in level) for level in self.levels), self.slots.to(device))


def _to(data: Any, device: torch.device) -> Any:
    moved = {name: _to(x, device) for name, x in vars(data).items() if isinstance(x, Fold)}
    moved |= {name: x.to(device) for name, x in vars(data).items() if isinstance(x, Tensor)}
    return replace(data, **moved)


def plan_levels(parents: Sequence[int], lengths: Sequence[int]) -> LevelPlan:
    """The plan for a packed row whose segments have these parents and lengths; leaves without tokens are left out."""
    bounds = [0, *accumulate(lengths)]
    own = [torch.arange(*bounds[s : s + 2]) for s in range(len(parents))]
    inner = set(parents)
    branch: list[Tensor] = []  # packed positions from the root to the segment's end
    depths: list[int] = []
    for s, parent in enumerate(parents):
        branch.append(own[s] if parent < 0 else torch.cat([branch[parent], own[s]]))
        depths.append(0 if parent < 0 else depths[parent] + 1)
    table = ancestors(parents)
    segment = torch.arange(len(parents)).repeat_interleave(torch.tensor(lengths))
    path = torch.cat([torch.arange(len(b) - n, len(b)) for b, n in zip(branch, lengths, strict=True)])
    slots = torch.zeros(bounds[-1], dtype=torch.long)
    used = 0
    levels: list[tuple[LevelBatch, ...]] = []
    row_of: dict[int, int] = {}  # at the depth above: segment → row of its state
    for depth in range(max(depths) + 1):
        here = [s for s, d in enumerate(depths) if d == depth and (lengths[s] > 0 or s in inner)]
        groups = [[s] for s in here] if depth == 0 else _of_like_length(here, lengths)
        batches: list[LevelBatch] = []
        for group in groups:
            # at least two tokens: kernels for a single one have no backward pass
            width = max(2, max(lengths[s] for s in group)) if depth > 0 else lengths[group[0]]
            tokens = pad_sequence([*(own[s] for s in group), torch.zeros(width).long()], batch_first=True)[:-1]
            counts = torch.tensor([lengths[s] for s in group])
            is_token = torch.arange(width) < counts[:, None]
            slots[tokens[is_token]] = (used + torch.arange(tokens.numel()).view_as(tokens))[is_token]
            if depth == 0:
                fold, keys, queries = None, own[group[0]][None], own[group[0]][None]
                has_key = has_query = torch.ones_like(keys, dtype=torch.bool)
            else:
                fold, queries, has_query, keys, has_key = _fold(group, parents, own, branch, is_token)
            q, k = (segment[queries], path[queries]), (segment[keys], path[keys])
            seen = visible(table, *q, *k) & has_query[..., None] & has_key[:, None]
            seen[..., 0] |= ~has_query  # a query that sees nothing would make NaN
            batches.append(
                LevelBatch(
                    tokens,
                    None if bool(is_token.all()) else counts,
                    None if depth == 0 else torch.tensor([row_of[parents[s]] for s in group]),
                    fold,
                    slots[keys],
                    seen,
                    q[1][..., :, None] - k[1][..., None, :],
                )
            )
            used += tokens.numel()
        row_of = {s: row for row, s in enumerate(s for group in groups for s in group)}
        levels.append(tuple(batches))
    return LevelPlan(tuple(level for level in levels if level), slots)


def _of_like_length(segments: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Groups segments so that none needs much padding (see PADDING), siblings side by side."""
    groups: list[list[int]] = []
    for s in sorted(segments, key=lambda s: -lengths[s]):
        if groups and lengths[s] >= (1 - PADDING) * lengths[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])
    return [sorted(group) for group in groups]


def _fold(
    group: Sequence[int],
    parents: Sequence[int],
    own: Sequence[Tensor],
    branch: Sequence[Tensor],
    is_token: Bool[Tensor, "B L"],
) -> tuple[Fold, Tensor, Tensor, Tensor, Tensor]:
    """A batch's fold, then packed positions and validity (False is padding) of its queries, and of its keys."""
    families: dict[int, list[int]] = {}  # parent → places of its children in the batch
    for place, s in enumerate(group):
        families.setdefault(parents[s], []).append(place)
    places = torch.arange(is_token.numel()).view_as(is_token)
    take = [torch.cat([places[b][is_token[b]] for b in family]) for family in families.values()]
    queries = [torch.cat([own[group[b]] for b in family]) for family in families.values()]
    keys = [torch.cat([branch[p], q]) for p, q in zip(families, queries, strict=True)]
    grid, has_query = _padded(take)
    back = torch.zeros_like(places)
    back.view(-1)[grid[has_query]] = torch.arange(grid.numel()).view_as(grid)[has_query]
    return Fold(grid, back), *_padded(queries), *_padded(keys)


def _padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows as one tensor, and which of its elements are no padding."""
    is_there = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), is_there


@dataclass(frozen=True)
class Ran:
    """Results of the batches so far, by layer: keys and values of all their tokens, states of the depth above."""

    keys: Mapping[int, Float[Tensor, "H S D"]] = field(default_factory=dict)
    values: Mapping[int, Float[Tensor, "H S D"]] = field(default_factory=dict)
    states: Mapping[int, LayerState] = field(default_factory=dict)


class LevelCache(StateCache):
    """The cache of one batch. It never changes the results of earlier batches, so that a layer may run again."""

    def __init__(self, batch: LevelBatch, ran: Ran) -> None:
        super().__init__()
        before = {} if batch.sources is None else select_states(ran.states, batch.sources)
        self.states = States(before, batch.lengths)
        self.batch, self.ran = batch, ran
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values (B, H, L, D); returns those that each row of the grid can see, (R, H, S, D)."""
        self.keys[layer_idx] = _appended(self.ran.keys.get(layer_idx), key_states)
        self.values[layer_idx] = _appended(self.ran.values.get(layer_idx), value_states)
        if self.batch.fold is None:
            return key_states, value_states
        index = self.batch.keys
        return (
            self.keys[layer_idx][:, index].transpose(0, 1),
            self.values[layer_idx][:, index].transpose(0, 1),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that ran before. Models do not use it: they are given positions and masks."""
        return next((keys.shape[1] for keys in self.ran.keys.values()), 0)


def _appended(old: Tensor | None, new: Float[Tensor, "B H L D"]) -> Float[Tensor, "H S D"]:
    flat = new.transpose(0, 1).flatten(1, 2)
    return flat if old is None else torch.cat([old, flat], dim=1)


def run_levels(plan: LevelPlan, forward: Callable[[LevelBatch, LevelCache], Float[Tensor, "B L D"]]) -> Tensor:
    """Hidden states of all packed positions, (N, D). Calls `forward` once for each batch of the plan."""
    ran = Ran()
    hidden: list[Tensor] = []
    for level in plan.levels:
        states = []
        for batch in level:
            cache = LevelCache(batch, ran)
            hidden.append(forward(batch, cache).flatten(0, 1))
            states.append(cache.states.after)
            ran = Ran(cache.keys, cache.values, ran.states)
        if level is not plan.levels[-1]:
            ran = Ran(ran.keys, ran.values, join_states(states))
    return torch.cat(hidden)[plan.slots]
