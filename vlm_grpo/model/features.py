"""Image features: those of one prompt, joined for the prompts of a packed row, and split by prompt again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.tree.types import Prompt


@dataclass(frozen=True)
class Features:
    """The vision tower's output for the images of one or more prompts, in the order of their tokens."""

    kind: type  # the transformers output class that the model takes
    pooled: tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...] = ()  # tower layer → images
    is_list: bool = True  # the model expects a list of images, not one tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in a fixed order."""
        return (*self.pooled, *(image for layer in self.deepstack for image in layer))

    def replaced(self, tensors: Sequence[Tensor]) -> "Features":
        """The same structure with other tensors, given in the order of the property `tensors`."""
        queue = iter(tensors)
        pooled = tuple(next(queue) for _ in self.pooled)
        deepstack = tuple(tuple(next(queue) for _ in layer) for layer in self.deepstack)
        return Features(self.kind, pooled, deepstack, self.is_list)

    def cut(self, images: slice) -> "Features":
        """The features of a range of the images."""
        return Features(self.kind, self.pooled[images], tuple(layer[images] for layer in self.deepstack), self.is_list)

    def output(self) -> Any:
        """The features as the model takes them. Each call makes a new object, since models change their arguments."""
        pooled = list(self.pooled) if self.is_list else torch.cat(self.pooled)
        if self.deepstack:
            return self.kind(pooler_output=pooled, deepstack_features=[list(layer) for layer in self.deepstack])
        return self.kind(pooler_output=pooled)


def join_features(features: Sequence[Features | None]) -> Features | None:
    """Joins the features of several prompts; a prompt without images has None, and so has a row without any."""
    present = [f for f in features if f is not None]
    if not present:
        return None
    first = present[0]
    layers = zip(*(f.deepstack for f in present), strict=True)
    return Features(
        first.kind,
        tuple(t for f in present for t in f.pooled),
        tuple(tuple(image for part in same for image in part) for same in layers),
        first.is_list,
    )


def encoder_outputs(features: Features | None) -> dict[str, Any]:
    """Arguments for the model's forward, which then skips its vision tower; no arguments for no features."""
    return {} if features is None else {"mm_encoder_outputs": {"image": features.output()}}


def features_by_prompt(features: Features | None, prompts: Sequence[Prompt]) -> Iterator[Features | None]:
    """Splits joined features by prompt, by the number of the prompts' image tokens. The inverse of `join_features`."""
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
