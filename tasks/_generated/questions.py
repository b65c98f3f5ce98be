"""Questions about generated scenes that one colour answers: "large?", "left?". The tiny model knows few words more."""

import math
import zlib
from collections.abc import Sequence

import numpy as np

from tasks._generated.scenes import PLACE_MARGIN, SIZE_MARGIN, Scene, Shape, describe, first_scene

WORDS = ("left", "right", "top", "bottom", "small", "large")


def make_question_scene(split: str, index: int, seed: int = 0) -> tuple[Scene, str, str, str]:
    """(scene, question, answer, thought): the colour of the one shape that the question means.

    Every question is true of one shape alone, by a margin. Each of a scene's two colours is the answer equally often,
    however many of its shapes have it, so an answer made without the question is right half of the time at most. The
    thought is what the shape is and where, coarsely.
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
    """The shape furthest left, largest, …, and how clearly it is: 1 at the margin from which scenes say such words."""
    sign = -1 if word in ("right", "bottom", "large") else 1
    if word in ("small", "large"):
        measure = {shape: math.log(shape.side) / math.log(SIZE_MARGIN) for shape in shapes}
    else:
        axis = 0 if word in ("left", "right") else 1
        measure = {shape: shape.centre[axis] / size[axis] / PLACE_MARGIN for shape in shapes}
    first, *others = sorted(shapes, key=lambda shape: sign * measure[shape])
    return first, min((abs(measure[first] - measure[other]) for other in others), default=math.inf)
