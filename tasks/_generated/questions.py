"""Questions about generated scenes whose answer is a colour, such as "large?" and "left?", for the tiny model."""

import math
import zlib
from collections.abc import Sequence

import numpy as np

from tasks._generated.scenes import PLACE_MARGIN, SIZE_MARGIN, Scene, Shape, describe, first_scene

WORDS = ("left", "right", "top", "bottom", "small", "large")


def make_question_scene(split: str, index: int, seed: int = 0) -> tuple[Scene, str, str, str]:
    """A scene and a question about it, as (scene, question, answer, thought). The answer is a shape's colour.

    Every question applies to one shape only, by a margin. Each of a scene's two colours is the answer equally often,
    however many shapes have it, so a guess without reading the question is right at most half of the time. The thought
    says roughly what the shape is and where it is.
    """
    return first_scene(split, index, seed, _ask)


def _ask(scene: Scene) -> tuple[Scene, str, str, str] | None:
    meant = {word: _meant(word, scene.shapes, scene.image.size) for word in WORDS}
    of_colour: dict[str, list[str]] = {}
    for word, (shape, margin) in meant.items():
        if margin >= 1:
            of_colour.setdefault(shape.colour, []).append(word)
    if len(of_colour) < 2:
        return None
    rng = np.random.default_rng(zlib.crc32(scene.id.encode()))
    words = of_colour[str(rng.choice(sorted(of_colour)))]
    word = words[rng.integers(len(words))]
    shape = meant[word][0]
    return scene, f"{word}?", shape.colour, describe(shape, scene.image.size)


def _meant(word: str, shapes: Sequence[Shape], size: tuple[int, int]) -> tuple[Shape, float]:
    """The shape furthest left, largest, …, and by how much: 1 is the margin from which scenes use such words."""
    sign = -1 if word in ("right", "bottom", "large") else 1
    if word in ("small", "large"):
        measure = {shape: math.log(shape.side) / math.log(SIZE_MARGIN) for shape in shapes}
    else:
        axis = 0 if word in ("left", "right") else 1
        measure = {shape: shape.centre[axis] / size[axis] / PLACE_MARGIN for shape in shapes}
    first, *others = sorted(shapes, key=lambda shape: sign * measure[shape])
    return first, min((abs(measure[first] - measure[other]) for other in others), default=math.inf)
