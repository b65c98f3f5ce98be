"""What the vision tower made of images: of one prompt, and of all prompts in a packed row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.tree.types import Prompt


@dataclass(frozen=True)
class Features:
    """What the vision tower made of one or more prompts' images, in the order of their tokens."""

    kind: type  # the transformers output class to hand back to the model
    pooled: tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...] = ()  # level → images
    is_list: bool = True  # the model expects a list of images, not one tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in a fixed order."""
        return (*self.pooled, *(image for level in self.deepstack for image in level))

    def replaced(self, tensors: Sequence[Tensor]) -> "Features":
        """The same structure over other tensors, given in the order of `tensors`."""
        queue = iter(tensors)
        pooled = tuple(next(queue) for _ in self.pooled)
        return Features(self.kind, pooled, tuple(tuple(next(queue) for _ in lv) for lv in self.deepstack), self.is_list)

    def cut(self, images: slice) -> "Features":
        """Those of some of the images."""
        return Features(self.kind, self.pooled[images], tuple(level[images] for level in self.deepstack), self.is_list)

    def output(self) -> Any:
        """As the model takes it: a new object each time, since models change what they are given."""
        pooled = list(self.pooled) if self.is_list else torch.cat(self.pooled)
        if self.deepstack:
            return self.kind(pooler_output=pooled, deepstack_features=[list(level) for level in self.deepstack])
        return self.kind(pooler_output=pooled)


def join_features(features: Sequence[Features | None]) -> Features | None:
    """Features of a row's prompts as one; prompts without images bring None."""
    present = [f for f in features if f is not None]
    if not present:
        return None
    first = present[0]
    levels = zip(*(f.deepstack for f in present), strict=True)
    return Features(
        first.kind,
        tuple(t for f in present for t in f.pooled),
        tuple(tuple(image for level in same for image in level) for same in levels),
        first.is_list,
    )


def encoder_outputs(features: Features | None) -> dict[str, Any]:
    """Features as arguments of the model's forward, which then leaves out its tower; nothing for none."""
    return {} if features is None else {"mm_encoder_outputs": {"image": features.output()}}


def features_by_prompt(features: Features | None, prompts: Sequence[Prompt]) -> Iterator[Features | None]:
    """What `join_features` joined, prompt by prompt, by the number of image tokens."""
    taken = 0
    for prompt in prompts:
        first, missing = taken, int((prompt.image_block >= 0).sum())
        while missing > 0:
            assert features is not None, "a prompt has image tokens, and there are no features"
            missing -= features.pooled[taken].shape[:-1].numel()
            taken += 1
        assert missing == 0, "image features and image tokens do not match"
        own = slice(first, taken)
        yield None if first == taken else features.cut(own)  # type: ignore[union-attr]
