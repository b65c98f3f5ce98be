"""The reference policy of the KL penalty: the frozen initial model, or a mixture that follows the policy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from vlm_grpo.common.options import Range

PREFIX = "reference/"  # of the names of reference weights in a checkpoint


@dataclass
class ReferenceConfig:
    """The reference policy."""

    ROOM = "algorithm"

    # Let the reference of the KL penalty follow the policy: every ref_model_sync_steps steps it becomes
    # ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference
    sync_ref_model: bool = False
    # Share of the policy in that mixture
    ref_model_mixup_alpha: Annotated[float, Range(above=0, at_most=1)] = 0.6
    # Steps between two such mixtures
    ref_model_sync_steps: Annotated[int, Range(at_least=1)] = 512


def reference_tensors(reference: nn.Module, trained: Iterable[str]) -> dict[str, Tensor]:
    """The reference's weights of these names, by their names in a checkpoint. The others never leave their start."""
    weights = dict(reference.named_parameters())
    return {PREFIX + name: weights[name].detach() for name in trained}


@torch.no_grad()
def load_reference(reference: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights from `reference_tensors` into the reference; other tensors of a checkpoint are ignored."""
    weights = dict(reference.named_parameters())
    for name, value in tensors.items():
        if name.startswith(PREFIX):
            weights[name.removeprefix(PREFIX)].copy_(value)
