"""The warm-start data of the shipped tiny model: questions of several kinds about generated scenes."""

import json

import numpy as np
from PIL import Image

from tasks._generated.needs import demand_of
from tasks._generated.scenes import FEWEST_SHAPES, SPLITS, Box, describe, make_scene, target_shape

WARM_START_STAGES = ("named", "dense", "refer", "demand")


def warm_start_example(
    stage: str, index: int, seed: int = 0, looseness: float = 0.0
) -> tuple[Image.Image, str, str, str]:
    """One example for supervised training: (image, question, thought, answer), with boxes in generated pixels.

    Stage "dense" mixes four kinds of questions: the box of an expression, the shape at a place, and all shapes from
    left to right, with and without boxes. Its scenes may have a single shape, so the model can learn places before it
    must tell shapes apart. Stage "named" also names the kinds of shapes. Stage "refer" asks only for the box of an
    expression. Stage "demand" asks for the box and the name of a colour, as JSON. Its boxes are too large by
    ``looseness`` (see `loosen_box`), which leaves an error for reinforcement learning to correct.
    """
    if stage not in WARM_START_STAGES:
        raise ValueError(f"stage is {stage!r}; accepted: {', '.join(WARM_START_STAGES)}")
    kinds, mixed = stage == "named", stage in ("named", "dense")
    scene = make_scene("sft", index, seed, 1 if mixed else FEWEST_SHAPES, kinds)
    rng = np.random.default_rng([len(SPLITS), seed, index])
    kind = rng.choice(["box", "what", "names", "list"], p=[0.35, 0.1, 0.25, 0.3]) if mixed else "box"
    if kind == "box":
        box = list(loosen_box(rng, scene.box_xyxy, looseness, scene.image.size))
        if stage == "demand":
            colour = target_shape(scene).colour
            return scene.image, demand_of(colour), scene.thought, json.dumps({"label": colour, "bbox_2d": box})
        return scene.image, f"Locate: {scene.expression}", scene.thought, str(box)
    if kind == "what":
        shape = scene.shapes[rng.integers(len(scene.shapes))]
        words = describe(shape, scene.image.size, kinds)
        answer = f"{shape.colour} {shape.shape}" if kinds else shape.colour
        return scene.image, f"What is at {list(shape.box_xyxy)}?", words, answer
    ordered = sorted(scene.shapes, key=lambda shape: shape.box_xyxy[0])
    names = [describe(shape, scene.image.size, kinds) for shape in ordered]
    if kind == "names":
        return scene.image, "Name all from left to right.", "left to right", "; ".join(names)
    boxes = [f"{name} {list(shape.box_xyxy)}" for name, shape in zip(names, ordered, strict=True)]
    return scene.image, "List all from left to right.", "left to right", "; ".join(boxes)


def loosen_box(rng: np.random.Generator, box_xyxy: Box, share: float, size: tuple[int, int]) -> Box:
    """A box that is too large: each edge moves outwards by up to ``share`` of the side, but stays inside the image."""
    x1, y1, x2, y2 = box_xyxy
    out = rng.uniform(0, share, 4) * (x2 - x1, y2 - y1, x2 - x1, y2 - y1)
    xa, ya, xb, yb = round(x1 - out[0]), round(y1 - out[1]), round(x2 + out[2]), round(y2 + out[3])
    return max(xa, 0), max(ya, 0), min(xb, size[0]), min(yb, size[1])
