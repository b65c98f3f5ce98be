"""The tree rule: which tokens a token sees, at which position it stands, and which token predicts it.

A tree is a list of segments, each with a parent. A token sees the earlier tokens of its own segment, all tokens of the
segment's ancestors, and nothing else. A segment's rotary positions continue from the last position of its parent. The
parent's last token predicts the segment's first token. The same rule masks the packed rows of the update and the shared
cache of the rollout.

Letters: S segments, N packed positions, Q scored tokens, R rows of rotary positions, n tokens of one segment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.tree.types import Prompt, RolloutTree


def ancestors(parents: Sequence[int]) -> Bool[Tensor, "S S"]:
    """A table whose entry [i, j] is true if segment j is segment i or an ancestor of it.

    `parents[i]` is the parent of segment i, which is less than i, or -1 for a root.

    >>> ancestors([-1, 0, 0]).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    table = torch.eye(len(parents), dtype=torch.bool)
    for segment, parent in enumerate(parents):
        assert parent < segment, f"segment {segment} comes before its parent {parent}"
        if parent >= 0:
            table[segment] |= table[parent]
    return table


def visible(
    table: Bool[Tensor, "S S"],
    query_segment: Int[Tensor, "*B L"],
    query_path: Int[Tensor, "*B L"],
    key_segment: Int[Tensor, "*B N"],
    key_path: Int[Tensor, "*B N"],
) -> Bool[Tensor, "*B L N"]:
    """The tree rule as a mask: a query sees a key if the key's segment is its own or an ancestor, and it is not later.

    The paths hold each token's index along its branch, counted from the root.
    """
    of_branch = table[query_segment].gather(-1, key_segment[..., None, :].expand(*query_segment.shape, -1))
    return of_branch & (query_path[..., :, None] >= key_path[..., None, :])


@dataclass(frozen=True)
class Segment:
    """A stretch of tokens of one branch. The first `num_scored` tokens are scored; what follows was forced."""

    ids: Int[Tensor, " n"]
    parent: int  # -1 for a root
    num_scored: int = 0
    prompt: Prompt | None = None  # set for a root
    old_logprobs: Float[Tensor, " q"] | None = None  # of the scored tokens, by the sampling policy; none: 0
    advantage: float = 0.0
    weight: float = 0.0  # share of one token in the objective, every denominator included
    path_weight: float = 0.0  # of a leaf: share of one token of its whole path, where a path is one sequence
    factors: Float[Tensor, " q"] | None = None  # of the scored tokens in the policy's term; none: 1


def tree_segments(tree: RolloutTree) -> list[Segment]:
    """The tree's segments, depth first: prompt, thought 0, its answers or the thoughts continuing it, thought 1, …"""
    segments = [Segment(tree.prompt.ids, parent=-1, prompt=tree.prompt)]
    places: list[int] = []  # index of each thought's segment
    for thought in tree.thoughts:
        parent = len(segments)
        places.append(parent)
        ids = torch.cat([thought.ids, thought.bridge_ids])
        above = places[thought.parent] if thought.parent >= 0 else 0
        segments.append(Segment(ids, above, len(thought.ids), old_logprobs=thought.logprobs))
        for answer in thought.answers:
            segments.append(Segment(answer.ids, parent, len(answer.ids), old_logprobs=answer.logprobs))
    return segments


def with_weights(
    segments: Sequence[Segment],
    thought_advantages: Float[Tensor, " K"],
    answer_advantages: Float[Tensor, "K M"],
    thought_weights: Float[Tensor, " K"],
    answer_weights: Float[Tensor, "K M"],
) -> list[Segment]:
    """The segments of one tree, with the advantage of each segment and the weight of each of its tokens.

    Leaves are answers. A leaf's weight is also its `path_weight`. The answer row of a thought that has no answers is
    not used.
    """
    inner = {s.parent for s in segments}
    weighted = list(segments[:1])
    thought = answer = -1
    for place, segment in enumerate(segments[1:], start=1):
        if place in inner:
            thought, answer = thought + 1, -1
            value, weight = float(thought_advantages[thought]), float(thought_weights[thought])
            weighted.append(replace(segment, advantage=value, weight=weight))
        else:
            answer += 1
            value, weight = float(answer_advantages[thought, answer]), float(answer_weights[thought, answer])
            weighted.append(replace(segment, advantage=value, weight=weight, path_weight=weight))
    return weighted


@dataclass(frozen=True)
class TreePack:
    """Several trees in one row, without padding, and the Q scored tokens with all that the loss needs."""

    prompts: tuple[Prompt, ...]  # in the order of the row, which is also that of the image tokens
    parents: tuple[int, ...]  # the parent of each of the S segments; -1 for a prompt
    input_ids: Int[Tensor, " N"]
    segment: Int[Tensor, " N"]
    path: Int[Tensor, " N"]
    position_ids: Int[Tensor, "R N"]
    image_block: Int[Tensor, " N"]
    predictor: Int[Tensor, " Q"]  # packed position whose logits predict the target; it may repeat
    targets: Int[Tensor, " Q"]
    old_logprobs: Float[Tensor, " Q"]
    advantages: Float[Tensor, " Q"]
    weights: Float[Tensor, " Q"]
    factors: Float[Tensor, " Q"]
    owner: Int[Tensor, " Q"]  # segment that contains the target
    path_weights: Float[Tensor, " S"]

    @property
    def mask(self) -> Bool[Tensor, "N N"]:
        """The dense mask, which every attention backend must reproduce."""
        table = ancestors(self.parents).to(self.segment.device)
        return visible(table, self.segment, self.path, self.segment, self.path)

    def to(self, device: torch.device | str) -> "TreePack":
        """The same pack with its tensors on `device`."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def pack(trees: Iterable[Sequence[Segment]]) -> TreePack:
    """Lay trees side by side in one row. Each tree lists parents before children, and its root holds the prompt.

    The last token of a leaf is left out, since it predicts nothing and no other token sees it.
    """
    parts: dict[str, list[Tensor]] = {name: [] for name in _PER_TOKEN}
    prompts: list[Prompt] = []
    parents: list[int] = []
    path_weights: list[float] = []
    start, images = 0, 0
    for tree in trees:
        base = len(parents)
        inner = {s.parent for s in tree}
        last = [0] * len(tree)  # packed index of each segment's last token
        length = [0] * len(tree)  # tokens on the path up to and with the segment
        shift = 0  # rotary position minus path index, for all tokens after the prompt
        for index, segment in enumerate(tree):
            is_root = segment.parent < 0
            count = len(segment.ids) if is_root or index in inner else len(segment.ids) - 1
            before = 0 if is_root else length[segment.parent]
            path = torch.arange(before, before + count)
            if is_root:
                assert segment.prompt is not None, "the root of a tree carries its prompt"
                prompt = segment.prompt
                positions, block = prompt.position_ids, prompt.image_block
                shift = prompt.next_position - count
                prompts.append(prompt)
                parts["image_block"].append(torch.where(block >= 0, block + images, block))
                images += int(block.max()) + 1
            else:
                positions = (path + shift).expand(parts["position_ids"][-1].shape[0], -1)
                parts["image_block"].append(torch.full((count,), -1))
            scored = segment.num_scored
            if scored:
                own = torch.arange(start, start + scored - 1)
                parts["predictor"].append(torch.cat([torch.tensor([last[segment.parent]]), own]))
                parts["targets"].append(segment.ids[:scored])
                old = segment.old_logprobs
                parts["old_logprobs"].append(torch.zeros(scored) if old is None else old)
                parts["advantages"].append(torch.full((scored,), segment.advantage))
                parts["weights"].append(torch.full((scored,), segment.weight))
                parts["factors"].append(torch.ones(scored) if segment.factors is None else segment.factors)
                parts["owner"].append(torch.full((scored,), len(parents)))
            parts["input_ids"].append(segment.ids[:count])
            parts["segment"].append(torch.full((count,), len(parents)))
            parts["path"].append(path)
            parts["position_ids"].append(positions)
            path_weights.append(segment.path_weight)
            parents.append(segment.parent + base if not is_root else -1)
            length[index] = before + count
            start += count
            last[index] = start - 1
    joined = {name: torch.cat(tensors, dim=-1) if tensors else torch.zeros(0) for name, tensors in parts.items()}
    joined["path_weights"] = torch.tensor(path_weights)
    return TreePack(prompts=tuple(prompts), parents=tuple(parents), **joined)


_PER_TOKEN = (
    *("input_ids", "segment", "path", "position_ids", "image_block"),
    *("predictor", "targets", "old_logprobs", "advantages", "weights", "factors", "owner"),
)


@dataclass(frozen=True)
class Sequences:
    """The sequences that an objective is about, as E tokens: a scored token stands in as many as it is part of."""

    index: Int[Tensor, " E"]  # of the Q scored tokens
    sequence: Int[Tensor, " E"]  # number of the sequence, which is whole in its row
    advantages: Float[Tensor, " E"]
    weights: Float[Tensor, " E"]


def segment_sequences(row: TreePack) -> Sequences:
    """The sequences of an objective over segments: each segment is one sequence."""
    return Sequences(torch.arange(len(row.owner), device=row.owner.device), row.owner, row.advantages, row.weights)


def path_sequences(row: TreePack) -> Sequences:
    """The sequences of an objective over whole responses: each path from a prompt to a leaf is one sequence.

    A sequence has the advantage of its leaf. The tokens of a thought belong to as many sequences as the thought has
    answers. A token whose own weight is 0 has weight 0 in each of them.
    """
    device = row.owner.device
    leaves = torch.tensor(sorted({*range(len(row.parents))} - {*row.parents}), dtype=torch.long, device=device)
    on_path = ancestors(row.parents).to(device)[leaves][:, row.owner]  # (leaves, Q)
    leaf, index = on_path.nonzero().unbind(-1)
    sequence = leaves[leaf]
    of_segment = row.advantages.new_zeros(len(row.parents)).index_put((row.owner,), row.advantages)
    weights = row.path_weights[sequence] * (row.weights[index] > 0)
    return Sequences(index, sequence, of_segment[sequence], weights)


def packed_length(tree: Sequence[Segment]) -> int:
    """Number of positions that the tree takes in a row."""
    inner = {s.parent for s in tree}
    return sum(len(s.ids) - (i not in inner and s.parent >= 0) for i, s in enumerate(tree))


def fill_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """For each row, the indices of the trees it holds; `lengths` are the trees' lengths in tokens.

    A row holds at most `max_tokens` tokens, except that a longer tree gets a row of its own. Trees are placed by
    first fit, the longest first.

    >>> fill_rows([3, 9, 4, 2, 4], max_tokens=8)
    [[1], [2, 4], [0, 3]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((r for r, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            rows.append([])
            room.append(max_tokens)
            fit = len(rows) - 1
        rows[fit].append(index)
        room[fit] -= lengths[index]
    return rows
