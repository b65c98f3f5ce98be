"""Runs the vision tower over the images of several prompts.

Letters: N patches, c channels, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vlm_grpo.model.features import Features
from vlm_grpo.tree.types import Prompt

PIXEL_ROWS = 2**14  # patches (or tiles) of one call of the vision tower


class PatchProjection(nn.Conv3d):
    """A convolution over single patches of the kernel's size, as a matrix product.

    That is several times faster than torch's convolution.
    """

    def forward(self, input: Float[Tensor, "N c *kernel"]) -> Float[Tensor, "N D *one"]:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def encode_images(
    tower: Callable[[Mapping[str, Tensor]], Any], prompts: Sequence[Prompt], joint: bool
) -> list[Features | None]:
    """Image features of each prompt; None for a prompt without images.

    `tower` takes pixels as the prompts hold them. With `joint`, prompts share calls of up to PIXEL_ROWS rows of pixels.
    """
    encoded: list[Features | None] = [None] * len(prompts)
    for batch in _batches(prompts, joint):
        names = prompts[batch[0]].pixels
        out = tower({n: torch.cat([prompts[i].pixels[n] for i in batch]) for n in names})
        for i, features in zip(batch, _split(out, [prompts[i] for i in batch]), strict=True):
            encoded[i] = features
    return encoded


def _batches(prompts: Sequence[Prompt], joint: bool) -> list[list[int]]:
    """Indices of the prompts with images, in the batches that go through the tower together."""
    batches: list[list[int]] = []
    rows = 0
    for index, prompt in enumerate(prompts):
        if not prompt.pixels:
            continue
        count = len(prompt.pixels["pixel_values"])
        if batches and joint and rows + count <= PIXEL_ROWS:
            batches[-1].append(index)
            rows += count
        else:
            batches.append([index])
            rows = count
    return batches


def _split(out: Any, prompts: Sequence[Prompt]) -> list[Features]:
    """The tower's output for a batch of prompts, prompt by prompt."""
    is_list = isinstance(out.pooler_output, list | tuple)
    layers = out.get("deepstack_features") or ()
    features: list[Features] = []
    start = 0
    for prompt in prompts:
        if is_list:  # one tensor per image; where prompts go one by one, all of them are this prompt's
            count = len(prompt.original_sizes) if len(prompts) > 1 else len(out.pooler_output)
            pooled = tuple(out.pooler_output[start : start + count])
        else:  # one row per tile, as there are rows of pixels
            count = len(prompt.pixels["pixel_values"]) if len(prompts) > 1 else len(out.pooler_output)
            pooled = (out.pooler_output[start : start + count],)
        deepstack = tuple(tuple(layer[start : start + count]) for layer in layers)
        features.append(Features(type(out), pooled, deepstack, is_list))
        start += count
    return features
