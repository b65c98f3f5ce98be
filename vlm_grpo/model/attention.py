"""Attention under the tree rule, for every family that uses transformers' attention interface.

Three backends run the same rule over a packed row:

- `sdpa`: torch's scaled dot-product attention, once per block of the row that has visible pairs, under the block's
  mask. It runs on any device and for any family.
- `flex`: torch's FlexAttention with a block mask compiled from the rule. On a CPU it has no backward pass.
- `flash`: a variable-length kernel, once per depth of the tree (prompts, thoughts, answers). The queries are the tokens
  at that depth, the keys are gathered along each branch, and the mask is causal, aligned to the bottom right.

Prefill and decoding pass a mask and no tree. They take the dense path under every backend, since a step has few
queries.

The fourth backend, `levels`, serves models with linear-attention layers, whose branches cannot share a packed row:
`levels.py` runs the branches as rows of a batch, and `tree_levels` lets these rows attend to keys that they share.

Letters: B rows, H_q query heads, H_k key heads, G = H_q / H_k, L queries, S keys, D head size, N packed positions, C
gathered keys of one depth.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from vlm_grpo.common.errors import UserError
from vlm_grpo.tree.layout import Level, TreeLayout

Backend = Literal["sdpa", "flex", "flash", "levels", "flash_reference"]  # the last one is for tests
Varlen = Callable[[Tensor, Tensor, Tensor, Level, float, int | None], Tensor]  # as `reference_varlen`

# no name holds "flash": transformers would take it for one of its own kernels
IMPLEMENTATIONS: dict[Backend, str] = {
    "sdpa": "vlm_grpo_sdpa",
    "flex": "vlm_grpo_flex",
    "flash": "vlm_grpo_varlen",
    "levels": "vlm_grpo_levels",
    "flash_reference": "vlm_grpo_varlen_reference",
}


def tree_sdpa(
    module: nn.Module,
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B L H_q D"], None]:
    """Dense attention under the given mask; with a `tree`, attention block by block under the tree's masks."""
    if tree is None:
        assert attention_mask is not None, "the tree mask did not reach the attention function"
        return _folded(query, key, value, attention_mask, dropout, scaling).transpose(1, 2).contiguous(), None
    masks = tree.block_biases(sliding_window, query.shape[1] // key.shape[1], value.dtype)
    # split, not slices: split's gradient is one concatenation, while each slice's gradient is as long as the row
    sizes = [block.stop - block.start for block in tree.blocks]
    queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
    roots = {block.start: number for number, block in enumerate(tree.blocks)}
    outputs = []
    for number, (block, mask) in enumerate(zip(tree.blocks, masks, strict=True)):
        k, v = keys[number], values[number]
        if block.root_stop > block.root:
            root = roots[block.root]
            k, v = torch.cat([keys[root], k], dim=2), torch.cat([values[root], v], dim=2)
        outputs.append(_folded(queries[number], k, v, mask, dropout, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _folded(
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    mask: Bool[Tensor, "B 1 GL S"] | Float[Tensor, "B 1 GL S"],
    dropout: float,
    scaling: float | None,
) -> Float[Tensor, "B H_q L D"]:
    """Attention that never repeats keys and values for the query heads that share them.

    Query heads of one key head are laid one after another along the query axis, G·L, as they are in the mask.
    """
    rows, heads, length, size = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1] * length, size)  # (B, H_k, G·L, D)
    out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
    return out.reshape(rows, heads, length, size)


def tree_flex(
    module: nn.Module,
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B L H_q D"], None]:
    """FlexAttention under the packed row's block mask; without a `tree`, the same as `tree_sdpa`."""
    if tree is None:
        return tree_sdpa(module, query, key, value, attention_mask, dropout, scaling)
    assert dropout == 0.0, f"dropout {dropout}: the model is not in evaluation mode"
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise UserError("attention=flex: torch has no backward of FlexAttention on a CPU; train with attention=sdpa")
    # under autocast, rotary positions leave queries and keys in float32
    query, key = query.to(value.dtype), key.to(value.dtype)
    mask = tree.block_mask(sliding_window)
    flex = _flex(query.device.type)
    out = flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous(), None


@cache
def _flex(device: str) -> Callable[..., Tensor]:
    if device == "cpu":  # compiling takes a minute there, and only forward passes run
        return _uncompiled_flex
    # Rows differ in length: dynamic shapes keep one kernel. fullgraph: too many recompilations raise an error, where
    # torch would otherwise compute dense attention without a word
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _uncompiled_flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        return flex_attention(query, key, value, **options)


def _tree_flash(
    module: nn.Module,
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "B H_k S D"],
    value: Float[Tensor, "B H_k S D"],
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    sliding_window: int | None = None,
    *,
    varlen: Callable[[], Varlen],
    **_: object,
) -> tuple[Float[Tensor, "B L H_q D"], None]:
    """One variable-length call per depth of the tree; without a `tree`, the same as `tree_sdpa`."""
    if tree is None:
        return tree_sdpa(module, query, key, value, attention_mask, dropout, scaling)
    assert dropout == 0.0, f"dropout {dropout}: the model is not in evaluation mode"
    assert len(query) == 1, f"a packed row is one row, not {len(query)}"
    kernel = varlen()
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    # under autocast, rotary positions leave queries and keys in float32
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (N, H, D)
    queries = q[tree.by_level].split([len(level.queries) for level in tree.levels])
    outputs = [
        kernel(part, k[level.keys], v[level.keys], level, scale, sliding_window)
        for part, level in zip(queries, tree.levels, strict=True)
    ]
    return torch.cat(outputs)[tree.from_levels][None], None


def reference_varlen(
    query: Float[Tensor, "L H_q D"],
    key: Float[Tensor, "C H_k D"],
    value: Float[Tensor, "C H_k D"],
    level: Level,
    scale: float,
    window: int | None,
) -> Float[Tensor, "L H_q D"]:
    """Causal attention of each segment's queries to its keys, the last query aligned with the last key.

    Every kernel must compute the same. This one is plain torch: it takes any dtype and is differentiable. `window` is
    the number of keys that a query sees, itself included; None means all.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = []
    query_bounds, key_bounds = level.query_bounds.tolist(), level.key_bounds.tolist()
    for i in range(len(query_bounds) - 1):
        own, seen = slice(*query_bounds[i : i + 2]), slice(*key_bounds[i : i + 2])
        count, total = own.stop - own.start, seen.stop - seen.start
        distance = torch.arange(total - count, total, device=query.device)[:, None] - torch.arange(
            total, device=query.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = torch.einsum("lhd,shd->hls", query[own], key[seen]) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hls,shd->lhd", weights, value[seen]))
    return torch.cat(outputs)


@cache
def varlen_kernel() -> tuple[str, Varlen] | None:
    """Name and function of this GPU's variable-length kernel: flash-attn 2's, else torch's own, else None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    try:
        import flash_attn  # type: ignore[import-not-found]
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        return f"flash-attn {flash_attn.__version__}", partial(_flash_attn_varlen, flash_attn_varlen_func)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # its first releases take neither windows nor shared key heads
    if not {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
        return None
    return f"torch {torch.__version__} varlen_attn", partial(_torch_varlen, varlen_attn)


def _flash_attn_varlen(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float, window: int | None
) -> Tensor:
    lengths = level.query_bounds, level.key_bounds, level.max_queries, level.max_keys
    size = (-1, -1) if window is None else (window - 1, 0)  # keys to the left and right of the query's own
    return kernel(q, k, v, *lengths, softmax_scale=scale, causal=True, window_size=size)


def _torch_varlen(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, level: Level, scale: float, window: int | None
) -> Tensor:
    size = q.shape[-1]
    if size % 8:  # the kernel takes multiples of 8; zeros change neither dot products nor the values kept
        q, k, v = (F.pad(x, (0, -size % 8)) for x in (q, k, v))
    lengths = level.query_bounds, level.key_bounds, level.max_queries, level.max_keys
    # to this kernel (-1, 0) means causal, and flash kernels align a causal mask to the bottom right
    limits = (-1, 0) if window is None else (window - 1, 0)
    return kernel(q, k, v, *lengths, scale=scale, window_size=limits, enable_gqa=True)[..., :size]


def _installed_varlen() -> Varlen:
    found = varlen_kernel()
    if found is None:
        raise UserError("attention=flash: " + "; ".join(_NO_KERNEL))
    return found[1]


tree_flash = partial(_tree_flash, varlen=_installed_varlen)
tree_flash_reference = partial(_tree_flash, varlen=lambda: reference_varlen)


@dataclass(frozen=True)
class Fold:
    """Where the tokens of a batch stand in the grid of queries that attention sees, R rows of C queries."""

    take: Int[Tensor, "R C"]  # each query's token, an index into the flattened batch; padding repeats a token
    back: Int[Tensor, "B L"]  # each token's query, an index into the flattened grid; padding repeats a query


def tree_levels(
    module: nn.Module,
    query: Float[Tensor, "B H_q L D"],
    key: Float[Tensor, "R H_k S D"],
    value: Float[Tensor, "R H_k S D"],
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Fold | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B L H_q D"], None]:
    """Attention of branches, each a row of a batch, to the keys that they share; without a `tree`, as `tree_sdpa`."""
    if tree is None:
        return tree_sdpa(module, query, key, value, attention_mask, dropout, scaling)
    grid = query.transpose(1, 2).flatten(0, 1)[tree.take].transpose(1, 2)  # (R, H_q, C, D)
    out = _folded(grid, key, value, attention_mask, dropout, scaling)
    return out.transpose(1, 2).flatten(0, 1)[tree.back], None


_FUNCTIONS: dict[Backend, Callable[..., Any]] = {
    "sdpa": tree_sdpa,
    "flex": tree_flex,
    "flash": tree_flash,
    "levels": tree_levels,
    "flash_reference": tree_flash_reference,
}


for _backend, _function in _FUNCTIONS.items():
    AttentionInterface.register(IMPLEMENTATIONS[_backend], _function)
    AttentionMaskInterface.register(IMPLEMENTATIONS[_backend], sdpa_mask)


_NO_KERNEL = (
    "there is no variable-length kernel",
    "it takes an NVIDIA GPU of the Ampere generation or later and either flash-attn 2 (pip install 'vlm-grpo[flash]') "
    "or a torch whose torch.nn.attention.varlen knows window_size and enable_gqa; else use attention=sdpa",
)
