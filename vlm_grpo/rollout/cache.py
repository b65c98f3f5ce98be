"""The cache of growing trees: every token's keys and values exist once, and branches copy nothing."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from vlm_grpo.model.states import StateCache


class TreeCache(StateCache):
    """Keys and values of B growing trees: per layer one buffer (B, H, S, D) in which every token has its own slot.

    `lanes` and `slots` say where the tokens of the next forward go; the model calls `update` once per layer.
    """

    def __init__(self, lanes: int, slots: int) -> None:
        super().__init__()
        self.shape = (lanes, slots)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._prefill: tuple[int, int] | None = None
        self._where: tuple[Tensor, Tensor] | None = None
        self._stop = 0

    def write_prompt(self, lane: int, length: int) -> None:
        """The next forward reads one prompt: its tokens take the lane's first slots and see nothing before them."""
        self._prefill = (lane, length)

    def write_block(self, slots: Int[Tensor, "n L"], stop: int, lanes: Int[Tensor, "n L"] | None = None) -> None:
        """The next forward reads a block: its tokens go to these slots (of these lanes; else each row to its own), and
        see the slots before `stop`.
        """
        self._prefill = None
        self._where = (torch.arange(len(slots), device=slots.device)[:, None] if lanes is None else lanes, slots)
        self._stop = stop

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, H, L, D); give those that the block may see."""
        if layer_idx not in self.keys:
            lanes, slots = self.shape
            heads = key_states.shape[1]
            # zeros: a slot that nobody sees must still not hold NaN
            self.keys[layer_idx] = key_states.new_zeros((lanes, heads, slots, key_states.shape[-1]))
            self.values[layer_idx] = value_states.new_zeros((lanes, heads, slots, value_states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill is not None:
            lane, length = self._prefill
            keys[lane, :, :length] = key_states[0]
            values[lane, :, :length] = value_states[0]
            return key_states, value_states
        assert self._where is not None, "write_prompt or write_block comes before the forward"
        where = self._where
        keys.transpose(1, 2)[where] = key_states.transpose(1, 2)
        values.transpose(1, 2)[where] = value_states.transpose(1, 2)
        return keys[:, :, : self._stop], values[:, :, : self._stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use; positions and masks are always given, so no model builds its own from it."""
        return self._stop

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are part of the mask, never of the cache."""
        return [False] * max(1, len(self.keys))
