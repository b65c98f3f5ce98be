"""The reference policy that a KL penalty is relative to: the frozen start, or one that follows the policy in steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlm_grpo.config import refuse_idle
from vlm_grpo.errors import UserError

PREFIX = "reference/"  # of its weights among a checkpoint's tensors


@dataclass
class ReferenceConfig:
    """The reference policy."""

    # Let the reference of the KL penalty follow the policy: every ref_model_sync_steps steps it becomes
    # ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference
    sync_ref_model: bool = False
    # Share of the policy in that mixture
    ref_model_mixup_alpha: float = 0.6
    # Steps between two such mixtures
    ref_model_sync_steps: int = 512


def check_reference_options(config: ReferenceConfig, beta: float, has_adapter: bool = False) -> None:
    """Raise UserError for values without meaning or effect. Source of the moving reference: arXiv 2404.09656."""
    if not 0 < config.ref_model_mixup_alpha <= 1:
        raise UserError(f"ref_model_mixup_alpha={config.ref_model_mixup_alpha}: must be above 0 and at most 1")
    if config.ref_model_sync_steps < 1:
        raise UserError(f"ref_model_sync_steps={config.ref_model_sync_steps}: must be at least 1")
    if not config.sync_ref_model:
        refuse_idle(config, ("ref_model_mixup_alpha", "ref_model_sync_steps"), "with sync_ref_model=false")
    if config.sync_ref_model and beta == 0:
        raise UserError("sync_ref_model=true with beta=0: without a KL penalty there is no reference: give beta")
    if config.sync_ref_model and has_adapter:
        raise UserError(
            "sync_ref_model=true with an adapter (lora_r): there the reference is the model without its adapter, which "
            "cannot move: set lora_r=0 or sync_ref_model=false"
        )


def reference_tensors(reference: nn.Module, trained: Iterable[str]) -> dict[str, Tensor]:
    """The reference's weights of these names, as a checkpoint keeps them; all others are the start's."""
    weights = dict(reference.named_parameters())
    return {PREFIX + name: weights[name].detach() for name in trained}


@torch.no_grad()
def load_reference(reference: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the weights that `reference_tensors` gave back in their places; other tensors are left alone."""
    weights = dict(reference.named_parameters())
    for name, value in tensors.items():
        if name.startswith(PREFIX):
            weights[name.removeprefix(PREFIX)].copy_(value)
