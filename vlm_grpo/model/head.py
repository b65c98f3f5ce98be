"""The output head: the policy's distribution over tokens, and log-probabilities that never need all logits at once.

Letters: Q targets, q targets of one chunk, V vocabulary, D hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.families import Family

LOGIT_ELEMENTS = 2**25  # logits that exist at once: 128 MiB in float32

# The policy's logits of some targets and the targets, to the values wanted of each target
TargetValues = Callable[[Tensor, Tensor], Tensor]


def target_logprobs(logits: Float[Tensor, "q V"], targets: Int[Tensor, " q"]) -> Float[Tensor, " q"]:
    """Log-probabilities of the targets."""
    return -F.cross_entropy(logits, targets, reduction="none")


def target_logprobs_and_entropies(logits: Float[Tensor, "q V"], targets: Int[Tensor, " q"]) -> Float[Tensor, "q 2"]:
    """Log-probabilities of the targets, and the entropies of the distributions that they are drawn from."""
    logprobs = logits.log_softmax(-1)
    possible = logprobs.masked_fill(logprobs.isneginf(), 0.0)  # a forbidden token adds neither value nor gradient
    entropies = -(logprobs.exp() * possible).sum(-1)
    return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], entropies], dim=-1)


@contextmanager
def head_gives(
    head: nn.Module,
    targets: Int[Tensor, " Q"],
    policy_logits: Callable[[Tensor], Tensor],
    values: TargetValues,
) -> Iterator[None]:
    """Inside, the output head returns values (1, Q, …) of the targets instead of logits (1, Q, V).

    The model still calls the head in its forward, so that wrappers around the model keep working. Logits are computed
    chunk by chunk, and again in the backward pass.
    """
    plain = head.forward

    def chunk(hidden: Float[Tensor, "q D"], targets: Int[Tensor, " q"]) -> Float[Tensor, "q *two"]:
        return values(policy_logits(plain(hidden)), targets)

    def forward(hidden: Float[Tensor, "1 Q D"]) -> Float[Tensor, "1 Q *two"]:
        size = max(1, LOGIT_ELEMENTS // head.weight.shape[0])  # type: ignore[union-attr]
        parts = list(zip(hidden[0].split(size), targets.split(size), strict=True))
        if len(parts) == 1 or not torch.is_grad_enabled():
            return torch.cat([chunk(*part) for part in parts])[None]
        return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])[None]

    with replaced_forward(head, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, the module computes `forward`."""
    plain = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = plain


def end_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Ids that end a sequence. Raises: UserError if neither the generation config nor the tokenizer names one."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("model: neither the generation config nor the tokenizer names an end-of-sequence id")
    return frozenset(ids)


def forbidden_ids(
    family: Family, config: Any, tokenizer: Any, eos_ids: frozenset[int], vocabulary: int
) -> Int[Tensor, " f"]:
    """Ids below `vocabulary` that no answer may hold: image tokens, padding, and ids that the tokenizer lacks."""
    ids = {getattr(config, name, None) for name in family.placeholders} | {tokenizer.pad_token_id}
    added = tokenizer.get_added_vocab()
    ids |= {added.get(token) for token in family.placeholder_tokens}
    wanted = {i for i in ids if i is not None} - eos_ids | set(range(len(tokenizer), vocabulary))
    return torch.tensor(sorted(i for i in wanted if i < vocabulary), dtype=torch.long)
