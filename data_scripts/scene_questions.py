"""Questions about generated scenes that one colour answers: "large?", "left?". The tiny model knows few words more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from data_scripts.tiny_scenes import PLACE_MARGIN, SIZE_MARGIN, SPLITS, Shape, describe, make_scene

WORDS = ("left", "right", "top", "bottom", "small", "large")


def colour_question(split: str, index: int, seed: int = 0) -> tuple[Image.Image, str, str, str]:
    """(image, question, answer, thought) of scene number `index`: the colour of the one shape that the question means.

    The question is true of one shape alone, with a margin; the thought is what that shape is and where, coarsely.
    """
    rng = np.random.default_rng([len(SPLITS) + 1, SPLITS.get(split, len(SPLITS)), seed, index])
    attempt = index
    while True:
        scene = make_scene(split, attempt, seed)
        meant = [(word, shape) for word in WORDS if (shape := _the(word, scene.shapes, scene.image.size))]
        if meant:
            word, shape = meant[rng.integers(len(meant))]
            return scene.image, f"{word}?", shape.colour, describe(shape, scene.image.size)
        attempt += 1_000_000  # alone or a crowd of equals: take a scene that no other index draws


def _the(word: str, shapes: Sequence[Shape], size: tuple[int, int]) -> Shape | None:
    """The shape that is furthest left, largest, …; None where another comes close, or is lacking."""
    axis = 0 if word in ("left", "right") else 1
    sign = -1 if word in ("right", "bottom", "large") else 1
    sized = word in ("small", "large")
    if len(shapes) < 2:
        return None
    first, second = sorted(shapes, key=lambda shape: sign * (shape.side if sized else shape.centre[axis]))[:2]
    if sized:
        clear = max(first.side, second.side) > SIZE_MARGIN * min(first.side, second.side)
    else:
        clear = abs(first.centre[axis] - second.centre[axis]) > PLACE_MARGIN * size[axis]
    return first if clear else None
