"""Turns a sample into a prompt: its question in the model's chat template, its images through the model's processor.

Letters: P prompt tokens, R rows of rotary positions.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.images import open_image
from vlm_grpo.model.coordinates import instruction, to_model
from vlm_grpo.model.families import Family, find_family, image_blocks, resized_sizes
from vlm_grpo.task.interface import Sample
from vlm_grpo.tree.tags import FORMAT, THOUGHT_OPEN
from vlm_grpo.tree.types import Prompt


class PromptBuilder:
    """Turns samples into prompts with the processor of one model."""

    def __init__(self, processor: Any, config: Any, rope_index: Callable[..., Any] | None) -> None:
        """`config` is the model's. `rope_index` computes its rotary positions; None if they are 0, 1, 2, …"""
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.config = config
        self.family: Family = find_family(config)
        self.rope_index = rope_index
        self.image_token: int | None = getattr(config, "image_token_id", None) if self.family.is_vision else None
        ids = [getattr(config, name, None) for name in self.family.placeholders]
        self.placeholders = tuple(self.tokenizer.convert_ids_to_tokens([i for i in ids if i is not None]))

    def with_own_processor(self) -> "PromptBuilder":
        """The same builder with a copy of the processor, since two threads must not use one at once."""
        return PromptBuilder(copy.deepcopy(self.processor), self.config, self.rope_index)

    def build(self, sample: Sample, coordinates: bool = False) -> Prompt:
        """The sample as token ids, positions and pixels.

        `coordinates` says that the question gives boxes in original pixels; they are converted to the model's.

        Raises: UserError, naming the sample, if it cannot be read or if the model cannot take it.
        """
        _check_sample(sample, self.placeholders)
        if coordinates and len(sample.images) > 1:
            raise UserError(f"sample {sample.id!r} has {len(sample.images)} images; coordinates are those of one image")
        images = _open_images(sample)
        if images and not self.family.is_vision:
            raise UserError(f"sample {sample.id!r} has images, and model {self.config.model_type} reads text only")
        original: tuple[tuple[int, int], ...] = tuple(image.size for image in images)
        resized = tuple(self._resized(size, sample.id) for size in original)
        question = sample.question
        space = self.family.coordinates if coordinates and resized else None
        if space is not None:
            question = to_model(question, space, original[0], resized[0])
            question = f"{question}\n{instruction(space, resized[0])}"
        text = self._chat(f"{question}\n{FORMAT}", len(images))
        try:
            ids, pixels = self._tokenize(text, images)
        except ValueError as error:  # the processor refuses the images' sizes, or its template has no place for images
            raise UserError(f"sample {sample.id!r}: the model's processor refuses it: {error}") from error
        block = image_blocks(ids, self.image_token)
        return Prompt(sample, text, ids, self._positions(ids, pixels), block, pixels, original, resized, space)

    def _resized(self, size: tuple[int, int], sample_id: str) -> tuple[int, int]:
        try:
            return resized_sizes(self.processor.image_processor, [size])[0]
        except ValueError as error:
            raise UserError(
                f"sample {sample_id!r}: its image of {size[0]}×{size[1]} pixels cannot be resized ({error}); "
                "see on_bad_sample"
            ) from error

    def _chat(self, question: str, num_images: int) -> str:
        if self.tokenizer.chat_template is None and getattr(self.processor, "chat_template", None) is None:
            return f"{question}\n{THOUGHT_OPEN}"
        content: Any = question
        if self.family.is_vision:
            content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text if text.rstrip().endswith(THOUGHT_OPEN) else text + THOUGHT_OPEN

    def _tokenize(self, text: str, images: Sequence[Image.Image]) -> tuple[Int[Tensor, " P"], dict[str, Tensor]]:
        special = self.tokenizer.chat_template is None and not self.family.is_vision
        if not images:
            return self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"][0], {}
        inputs = self.processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt")
        return inputs["input_ids"][0], {k: inputs[k] for k in self.family.vision_inputs if k in inputs}

    def _positions(self, ids: Int[Tensor, " P"], pixels: Mapping[str, Tensor]) -> Int[Tensor, "R P"]:
        if self.family.positions == "arange":
            return torch.arange(len(ids))[None]
        if not pixels:
            return torch.arange(len(ids)).expand(3, -1)
        assert self.rope_index is not None, f"family {self.config.model_type} has no get_rope_index"
        of_image = (ids == self.image_token).int()[None]
        grid = pixels["image_grid_thw"]
        positions, _ = self.rope_index(ids[None], image_grid_thw=grid, mm_token_type_ids=of_image)
        return positions[:, 0]


def _check_sample(sample: Sample, placeholders: Sequence[str]) -> None:
    where = f"sample {sample.id!r}"
    if isinstance(sample.images, str) or not isinstance(sample.images, Sequence):
        raise UserError(f"{where}: images is {sample.images!r}; it must be a list, empty for a text-only sample")
    if not isinstance(sample.question, str):
        raise UserError(f"{where}: question is {sample.question!r}; it must be text")
    try:
        sample.question.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the question is no valid text: {error}") from error
    for token in placeholders:
        if token in sample.question:
            raise UserError(
                f"{where}: the question holds {token!r}, which marks an image's place for this model; leave it "
                "out, since the places of the sample's images are made by the chat template"
            )


def _open_images(sample: Sample) -> list[Image.Image]:
    try:
        return [open_image(image, f"the image {image}") for image in sample.images]
    except UserError as error:
        raise UserError(f"sample {sample.id!r}: {error}; see on_bad_sample") from error
