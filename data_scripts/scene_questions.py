"""Questions about generated scenes that one colour answers: "large?", "left?". The tiny model knows few words more."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from data_scripts.tiny_scenes import PLACE_MARGIN, SIZE_MARGIN, Scene, Shape, describe

WORDS = ("left", "right", "top", "bottom", "small", "large")


def colour_question(scene: Scene) -> tuple[str, str, str]:
    """(question, answer, thought): the colour of the one shape that the question means; the scene's id chooses it.

    The question is true of one shape alone, by a margin if any question is; the thought is what that shape is and
    where, coarsely.
    """
    meant = {word: _meant(word, scene.shapes, scene.image.size) for word in WORDS}
    clear = [word for word in WORDS if meant[word][1] >= 1] or [max(WORDS, key=lambda word: meant[word][1])]
    word = clear[np.random.default_rng(zlib.crc32(scene.id.encode())).integers(len(clear))]
    shape = meant[word][0]
    return f"{word}?", shape.colour, describe(shape, scene.image.size)


def _meant(word: str, shapes: Sequence[Shape], size: tuple[int, int]) -> tuple[Shape, float]:
    """The shape furthest left, largest, …, and how clearly it is: 1 at the margin from which scenes say such words."""
    sign = -1 if word in ("right", "bottom", "large") else 1
    if word in ("small", "large"):
        measure = {shape: math.log(shape.side) / math.log(SIZE_MARGIN) for shape in shapes}
    else:
        axis = 0 if word in ("left", "right") else 1
        measure = {shape: shape.centre[axis] / size[axis] / PLACE_MARGIN for shape in shapes}
    first, *others = sorted(shapes, key=lambda shape: sign * measure[shape])
    return first, min((abs(measure[first] - measure[other]) for other in others), default=math.inf)
