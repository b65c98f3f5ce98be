"""Which attention backend suits a device, a precision and a model."""

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.attention import _NO_KERNEL, Carrier, varlen_kernel


@dataclass(frozen=True)
class Surroundings:
    """What the choice of a carrier depends on."""

    device: str  # "cpu", "cuda", …
    dtype: torch.dtype  # of the arithmetic
    causal: bool  # no token of the family sees a later one
    varlen: str | None  # name of the variable-length kernel there is
    flex: bool  # torch can compile FlexAttention here, or it runs uncompiled on a CPU
    linear: bool = False  # some layers are linear attention


def surroundings(device: torch.device, dtype: torch.dtype, causal: bool, linear: bool = False) -> Surroundings:
    """Those of this process."""
    is_cuda = device.type == "cuda"
    found = varlen_kernel() if is_cuda else None
    has_flex = importlib.util.find_spec("triton") is not None if is_cuda else device.type == "cpu"
    return Surroundings(device.type, dtype, causal, found[0] if found else None, has_flex, linear)


def choose_carrier(
    asked: Literal["auto", "sdpa", "flex", "flash", "levels"], around: Surroundings
) -> tuple[Carrier, str]:
    """The carrier and why.

    Raises: UserError for a carrier that was asked for and cannot be had.
    """
    if around.linear and asked not in ("auto", "levels"):
        raise UserError(f"attention={asked}: {LINEAR}; use attention=levels, or auto")
    if around.linear:
        return "levels", f"{'auto' if asked == 'auto' else 'as asked for'}, since {LINEAR}"
    missing = {"flash": _without_flash(around), "flex": _without_flex(around), "sdpa": None, "levels": None}
    if asked != "auto":
        reason = missing[asked]
        if reason is not None:
            raise UserError(f"attention={asked}: " + "; ".join(reason))
        if asked == "flash":
            return asked, f"as asked for, with {around.varlen}"
        return asked, "as asked for" + (", forward only on a CPU" if (asked, around.device) == ("flex", "cpu") else "")
    if around.device != "cuda":
        return "sdpa", f"auto on {around.device}"
    if missing["flash"] is None:
        return "flash", f"auto on cuda, with {around.varlen}"
    if missing["flex"] is None:
        return "flex", f"auto on cuda, no flash: {missing['flash'][0]}"
    return "sdpa", f"auto on cuda, no flash: {missing['flash'][0]}; no flex: {missing['flex'][0]}"


LINEAR = "the model has linear-attention layers, and along a packed row their state would run from sibling to sibling"


def _without_flash(around: Surroundings) -> tuple[str, str] | None:
    """Why there is no flash, and what to do."""
    if not around.causal:
        why = "tokens of one image see each other in this family, and variable-length kernels are causal"
        return why, "use attention=sdpa"
    if around.varlen is None:
        return _NO_KERNEL
    if around.dtype not in (torch.bfloat16, torch.float16):
        why = f"the kernels take bfloat16, and the arithmetic is {str(around.dtype).removeprefix('torch.')}"
        return why, "set dtype=auto or bfloat16, or use attention=sdpa"
    return None


def _without_flex(around: Surroundings) -> tuple[str, str] | None:
    if around.flex:
        return None
    return f"torch cannot compile it on {around.device} here", "it takes a GPU with triton; else use attention=sdpa"
