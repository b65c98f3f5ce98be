"""Which attention backend suits a device, a precision and a model."""

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.attention import _NO_KERNEL, Backend, varlen_kernel


@dataclass(frozen=True)
class Environment:
    """What the choice of an attention backend depends on."""

    device: str  # "cpu", "cuda", …
    dtype: torch.dtype  # in which matrices are multiplied
    causal: bool  # no token attends to a later one, as tokens of one image do in some families
    varlen: str | None  # name of the installed variable-length kernel
    flex: bool  # FlexAttention runs here: compiled on a GPU, uncompiled on a CPU
    linear: bool = False  # some layers are linear attention


def find_environment(device: torch.device, dtype: torch.dtype, causal: bool, linear: bool = False) -> Environment:
    """The environment of this process, for a model on `device` with the given properties."""
    is_cuda = device.type == "cuda"
    found = varlen_kernel() if is_cuda else None
    has_flex = importlib.util.find_spec("triton") is not None if is_cuda else device.type == "cpu"
    return Environment(device.type, dtype, causal, found[0] if found else None, has_flex, linear)


def choose_backend(
    asked: Literal["auto", "sdpa", "flex", "flash", "levels"], environment: Environment
) -> tuple[Backend, str]:
    """The attention backend for the option `attention`, and the reason for it in words.

    Raises: UserError if the backend that was asked for cannot run in this environment.
    """
    if environment.linear and asked not in ("auto", "levels"):
        raise UserError(f"attention={asked}: {LINEAR}; use attention=levels, or auto")
    if environment.linear:
        return "levels", f"{'auto' if asked == 'auto' else 'as asked for'}, since {LINEAR}"
    missing = {"flash": _without_flash(environment), "flex": _without_flex(environment), "sdpa": None, "levels": None}
    if asked != "auto":
        reason = missing[asked]
        if reason is not None:
            raise UserError(f"attention={asked}: " + "; ".join(reason))
        if asked == "flash":
            return asked, f"as asked for, with {environment.varlen}"
        return asked, "as asked for" + (
            ", forward only on a CPU" if (asked, environment.device) == ("flex", "cpu") else ""
        )
    if environment.device != "cuda":
        return "sdpa", f"auto on {environment.device}"
    if missing["flash"] is None:
        return "flash", f"auto on cuda, with {environment.varlen}"
    if missing["flex"] is None:
        return "flex", f"auto on cuda, no flash: {missing['flash'][0]}"
    return "sdpa", f"auto on cuda, no flash: {missing['flash'][0]}; no flex: {missing['flex'][0]}"


LINEAR = "the model has linear-attention layers, and along a packed row their state would run from sibling to sibling"


def _without_flash(environment: Environment) -> tuple[str, str] | None:
    """Why `flash` cannot run and what to do about it; None if it can."""
    if not environment.causal:
        why = "tokens of one image see each other in this family, and variable-length kernels are causal"
        return why, "use attention=sdpa"
    if environment.varlen is None:
        return _NO_KERNEL
    if environment.dtype not in (torch.bfloat16, torch.float16):
        why = f"the kernels take bfloat16, and the arithmetic is {str(environment.dtype).removeprefix('torch.')}"
        return why, "set dtype=auto or bfloat16, or use attention=sdpa"
    return None


def _without_flex(environment: Environment) -> tuple[str, str] | None:
    """Why `flex` cannot run and what it takes; None if it can."""
    if environment.flex:
        return None
    return (
        f"torch cannot compile it on {environment.device} here",
        "it takes a GPU with triton; else use attention=sdpa",
    )
