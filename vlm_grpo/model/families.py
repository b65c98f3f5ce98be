"""A table of the facts that differ between model families. A family that is not in it is an error, never a guess.

An entry is right if a packed pass of the family equals its unpacked model: `tests/unit/test_exact.py` checks them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.coordinates import CoordinateSpace


@dataclass(frozen=True)
class Family:
    """The facts about one model family."""

    coordinates: CoordinateSpace = CoordinateSpace.UNIT
    # rotary positions of a prompt: by the model's own function `get_rope_index`, or 0, 1, 2, …
    positions: Literal["rope_index", "arange"] = "arange"
    mask: Literal["tensor", "dict"] = "tensor"  # "dict": one mask per kind of layer
    image_sees_itself: bool = False  # tokens of one image attend to each other, also to later ones
    vision_inputs: tuple[str, ...] = ()  # the processor's outputs that `get_image_features` takes
    # images of several prompts may go through the vision tower in one call, joined along the first axis
    joint_images: bool = False
    vision_modules: tuple[str, ...] = ()  # prefixes of the tower's and the projector's parameters
    placeholders: tuple[str, ...] = ()  # config fields that hold the ids of image and video tokens
    placeholder_tokens: tuple[str, ...] = field(default=())  # more such tokens, for which the config has no field

    @property
    def is_vision(self) -> bool:
        """The family reads images."""
        return bool(self.vision_inputs)


_QWEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_QWEN2_VL = Family(
    coordinates=CoordinateSpace.THOUSAND,
    positions="rope_index",
    vision_inputs=("pixel_values", "image_grid_thw"),
    joint_images=True,
    vision_modules=("model.visual.",),
    placeholders=_QWEN_IDS,
    placeholder_tokens=("<|vision_pad|>",),
)
_TOWER_AND_PROJECTOR = ("model.vision_tower.", "model.multi_modal_projector.")

FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": Family(**{**vars(_QWEN2_VL), "coordinates": CoordinateSpace.RESIZED_PIXELS}),
    "qwen3_vl": _QWEN2_VL,
    "smolvlm": Family(
        vision_inputs=("pixel_values", "pixel_attention_mask"),
        vision_modules=("model.vision_model.", "model.connector."),
        placeholders=("image_token_id",),
        placeholder_tokens=("<fake_token_around_image>", "<global-img>"),
    ),
    "internvl": Family(
        coordinates=CoordinateSpace.THOUSAND,
        vision_inputs=("pixel_values",),
        joint_images=True,
        vision_modules=_TOWER_AND_PROJECTOR,
        placeholders=("image_token_id",),
        placeholder_tokens=("<img>", "</img>"),
    ),
    "llava_onevision": Family(
        vision_inputs=("pixel_values", "image_sizes", "batch_num_images"),
        vision_modules=(*_TOWER_AND_PROJECTOR, "model.image_newline"),
        placeholders=("image_token_id", "video_token_id"),
    ),
    "gemma3": Family(
        mask="dict",
        image_sees_itself=True,
        vision_inputs=("pixel_values",),
        joint_images=True,
        vision_modules=_TOWER_AND_PROJECTOR,
        placeholders=("image_token_id", "boi_token_id", "eoi_token_id"),
    ),
    "qwen3_5": _QWEN2_VL,
    "gpt2": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_5_text": Family(),
    "llama": Family(),
}


def find_family(config: PreTrainedConfig) -> Family:
    """The facts about the family of a model with this config.

    Raises: UserError for a family that is not in the table.
    """
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model: the family {config.model_type!r} is not in the table; known are {', '.join(sorted(FAMILIES))}. "
            "A new entry in vlm_grpo/model/families.py needs its coordinate space, position rule, mask, vision inputs."
        )
    return FAMILIES[config.model_type]


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kind of attention in each of the decoder's layers; only full attention if the config does not say."""
    return tuple(getattr(config.get_text_config(), "layer_types", None) or ("full_attention",))


def image_blocks(ids: Int[Tensor, " P"], image_token: int | None) -> Int[Tensor, " P"]:
    """For each token, the index of the run of image tokens that it belongs to; -1 for text.

    >>> image_blocks(torch.tensor([5, 9, 9, 5, 9]), image_token=9).tolist()
    [-1, 0, 0, -1, 1]
    """
    of_image = ids == image_token if image_token is not None else torch.zeros_like(ids, dtype=torch.bool)
    starts = of_image & ~torch.cat([of_image.new_zeros(1), of_image[:-1]])
    return torch.where(of_image, starts.cumsum(0) - 1, torch.full_like(ids, -1))


def resized_sizes(image_processor: Any, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(width, height) of each image as the model sees it, from its original (width, height).

    A processor with a patch grid rounds the sides to multiples of patch · merge within its pixel limits. The others
    tile or squash the image; their families use relative coordinates, so that the original size is kept.

    Raises: ValueError for an aspect ratio that the processor refuses.
    """
    if not isinstance(image_processor, Qwen2VLImageProcessor):
        return tuple(sizes)
    factor = image_processor.patch_size * image_processor.merge_size
    limits = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    resized = (smart_resize(height, width, factor, *limits) for width, height in sizes)
    return tuple((width, height) for height, width in resized)
