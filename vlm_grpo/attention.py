"""Attention that follows the tree rule, for every family that goes through transformers' attention interface.

Letters: B rows, H_q query heads, H_k key heads, G = H_q / H_k, L queries, S keys, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "vlm_grpo_tree"  # the name under which transformers finds `tree_attention`


@dataclass(frozen=True)
class Block:
    """Queries [start, stop) of a row see nothing but the root [root, root_stop) of their tree and themselves."""

    root: int
    root_stop: int
    start: int
    stop: int


def row_blocks(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Block, ...]:
    """The row cut into roots and the subtrees below each root's children, in the depth-first order of `tree.pack`.

    No pair of positions outside these blocks is visible, so attention skips the rest: most of a row that holds many
    branches.

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


def tree_attention(
    module: nn.Module,
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    attention_mask: Bool[Tensor, "B 1 L S"] | Float[Tensor, "B 1 L S"],
    dropout: float = 0.0,
    scaling: float | None = None,
    tree_blocks: tuple[Block, ...] | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B L H_q D"], None]:
    """Attention under a dense mask (boolean, or added to the scores), block by block where `tree_blocks` are given.

    Query heads that share a key head are folded into the query axis, so keys and values are never repeated.
    """
    assert attention_mask is not None, "the tree mask did not reach the attention function"
    if tree_blocks is None:
        return _folded(query, key, value, attention_mask, dropout, scaling).transpose(1, 2).contiguous(), None
    outputs = []
    for b in tree_blocks:
        own = slice(b.start, b.stop)
        keys, values, mask = key[:, :, own], value[:, :, own], attention_mask[:, :, own, own]
        if b.root_stop > b.root:
            root = slice(b.root, b.root_stop)
            keys, values = torch.cat([key[:, :, root], keys], dim=2), torch.cat([value[:, :, root], values], dim=2)
            mask = torch.cat([attention_mask[:, :, own, root], mask], dim=-1)
        outputs.append(_folded(query[:, :, own], keys, values, mask, dropout, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _folded(
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    mask: Tensor,
    dropout: float,
    scaling: float | None,
) -> Float[Tensor, "B H_q L D"]:
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * length, size)  # (B, H_k, G·L, D)
    mask = mask.repeat(1, 1, groups, 1) if groups > 1 else mask
    out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
    return out.reshape(rows, heads, length, size)


AttentionInterface.register(IMPLEMENTATION, tree_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
