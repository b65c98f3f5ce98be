"""Keeps the states of linear-attention layers for each branch of a tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from vlm_grpo.common.errors import UserError

LayerState = tuple[Tensor, Tensor]  # the convolution's (B, channels, k) and the recurrence's (B, H, D, D)


@dataclass
class States:
    """States of the linear-attention layers before and after one call of the model."""

    before: Mapping[int, LayerState] = field(default_factory=dict)  # by layer; empty for prompts, which start anew
    lengths: Int[Tensor, " B"] | None = None  # tokens of each row without padding; None if there is no padding
    convolution: dict[int, Tensor] = field(default_factory=dict)
    recurrence: dict[int, Tensor] = field(default_factory=dict)

    @property
    def after(self) -> dict[int, LayerState]:
        """The states after the call, by layer, from which a later call can start."""
        return {layer: (self.convolution[layer], self.recurrence[layer]) for layer in self.convolution}


def select_states(states: Mapping[int, LayerState], rows: Int[Tensor, " B"]) -> dict[int, LayerState]:
    """The states of the given rows. A row that is given several times starts several branches."""
    return {layer: (conv[rows], state[rows]) for layer, (conv, state) in states.items()}


def join_states(parts: Sequence[Mapping[int, LayerState]]) -> dict[int, LayerState]:
    """The states of all parts' rows, in order."""
    return {
        layer: (torch.cat([part[layer][0] for part in parts]), torch.cat([part[layer][1] for part in parts]))
        for layer in (parts[0] if parts else ())
    }


class StateCache(Cache):
    """A cache that serves linear-attention layers; subclasses add keys and values for the other layers."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states = States()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always True: layers then call `update_conv_state` even for one token, and change nothing in place."""
        return True

    def get_recurrent_states_to_keep(self, layer_idx: int | None = None) -> int:
        """Always 0: a later segment starts from the state after the last token and needs no other."""
        return 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The convolution's last inputs; None at the start of a prompt."""
        return self.states.before[layer_idx][0] if self.states.before else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state; None at the start of a prompt."""
        return self.states.before[layer_idx][1] if self.states.before else None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """Returns the old inputs joined with the new ones, and keeps the last of them before the padding."""
        old = self.get_conv_state(layer_idx)
        old = conv_states.new_zeros((*conv_states.shape[:2], conv_kernel_size)) if old is None else old
        joined = torch.cat([old, conv_states], dim=-1)
        if self.states.lengths is None:
            kept = joined[..., -conv_kernel_size:]
        else:
            last = self.states.lengths[:, None] + torch.arange(conv_kernel_size, device=joined.device)
            kept = joined.gather(-1, last[:, None].expand(-1, joined.shape[1], -1))
        self.states.convolution[layer_idx] = kept
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keeps the state after the batch and returns it."""
        self.states.recurrence[layer_idx] = recurrent_states
        return recurrent_states

    @property
    def is_sliding(self) -> list[bool]:
        """Always False: sliding windows are part of the mask, not of the cache."""
        return [False]


def hold_states_over_padding(model: nn.Module, count: int) -> None:
    """Installs hooks so that padding does not change the state of the model's `count` linear-attention layers.

    The gated delta rule S ← S·exp(g)·(I − β k kᵀ) + β v kᵀ changes nothing if β = 0 and g = 0. Both are functions of
    projections, β = sigmoid(b) and g = −exp(A)·softplus(a + bias), and both are 0 where the projections are −∞.

    Raises: UserError if the model has linear-attention layers of another kind.
    """
    layers = [m for m in model.modules() if all(hasattr(m, n) for n in ("in_proj_a", "in_proj_b", "conv1d", "A_log"))]
    if len(layers) != count:
        raise UserError(
            f"model: {count} of its layers are linear attention, and {len(layers)} of them are gated delta nets with "
            "projections in_proj_a and in_proj_b, which is the only kind that attention=levels knows"
        )
    padding: list[Tensor | None] = [None]  # of the layer that is running, (B, L)

    def enter(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache = kwargs.get("cache")
        lengths = cache.states.lengths if isinstance(cache, StateCache) else None
        padding[0] = None
        if lengths is not None:
            padding[0] = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]

    def project(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out if padding[0] is None else out.masked_fill(padding[0][..., None], -torch.inf)

    for layer in layers:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.get_submodule("in_proj_a").register_forward_hook(project)
        layer.get_submodule("in_proj_b").register_forward_hook(project)
