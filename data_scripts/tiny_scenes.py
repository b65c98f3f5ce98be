"""Generated scenes: coloured shapes, an expression that refers to one of them, and its exact box.

A scene is a pure function of (split, index, seed); splits draw from disjoint random streams. Every scene holds several
similar shapes, so that most expressions need a comparison ("the small red shape", "the left blue shape"). Boxes are
continuous xyxy in pixels of the generated image: painted columns are x1 to x2 - 1, painted rows y1 to y2 - 1.

    python -m data_scripts.tiny_scenes out=DIR [split=val] [count=200] [seed=0]

writes DIR/{split}.jsonl, one {"id", "image", "expression", "bbox_xyxy", "width", "height"} a line, and the PNGs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

from data_scripts.writing import DataError, required, run_script, whole_number

SPLITS = {"train": 0, "sft": 1, "val": 2, "test": 3}
COLOURS = {
    "red": (214, 40, 40),
    "green": (36, 160, 70),
    "blue": (40, 90, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 190),
}
SHAPES = ("square", "ring", "cross")
MIN_SIDE, MAX_SIDE = 130, 230  # pixels of the generated image
FEWEST_SHAPES, MOST_SHAPES = 3, 4
WARM_START_STAGES = ("named", "dense", "refer", "demand")
SIZE_MARGIN = 1.25  # side ratio from which "large" and "small" are said
PLACE_MARGIN = 0.08  # distance of centres, as a share of the image's side, from which "left", "top", ... are said

Box = tuple[int, int, int, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    colour: str
    shape: str
    box_xyxy: Box

    @property
    def side(self) -> int:
        return self.box_xyxy[2] - self.box_xyxy[0]

    @property
    def centre(self) -> tuple[float, float]:
        x1, y1, x2, y2 = self.box_xyxy
        return (x1 + x2) / 2, (y1 + y2) / 2


@dataclass(frozen=True)
class Scene:
    """One image and one expression. ``thought`` is a reference thought: what it is and where, coarsely."""

    id: str
    image: Image.Image
    expression: str
    box_xyxy: Box
    thought: str
    shapes: tuple[Shape, ...]


def make_scene(split: str, index: int, seed: int = 0, fewest: int = FEWEST_SHAPES, kinds: bool = False) -> Scene:
    """The scene number ``index`` of a split, of at least ``fewest`` shapes; the same arguments give the same scene.

    With ``kinds`` expression and thought may say ring, square or cross, otherwise they speak of shapes only.
    """
    rng = _generator(split, index, seed)
    while True:
        image, shapes = _draw(rng, fewest)
        if named := _refer(rng, shapes, image.size, kinds):
            break
    target, expression = named
    return Scene(
        id=f"{split}-{seed}-{index:06d}",
        image=image,
        expression=expression,
        box_xyxy=target.box_xyxy,
        thought=describe(target, image.size, kinds),
        shapes=shapes,
    )


def warm_start_example(
    stage: str, index: int, seed: int = 0, looseness: float = 0.0
) -> tuple[Image.Image, str, str, str]:
    """(image, question, thought, answer) for supervised training, boxes in pixels of the generated image.

    Stage "dense" mixes four questions: box of what, what is where, and all from left to right with and without boxes.
    Its scenes begin at a single shape: there a place can be learnt before it must be bound to one of several shapes.
    Stage "named" is the same and also names the kinds of shapes, so that there is more to see in a picture.
    Stage "refer" asks only for the box of what, stage "demand" for a box of a colour and its name, as JSON; there the
    boxes are too large by ``looseness``, see `loosen_box`: what a supervised start has wrong, and a reward can put
    right.
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


def middle_of(box: Sequence[float]) -> tuple[float, float, float, float]:
    """The box of half the width and half the height in the middle of a box.

    >>> middle_of((10, 20, 30, 60))
    (15.0, 30.0, 25.0, 50.0)
    """
    x1, y1, x2, y2 = box
    inset_x, inset_y = (x2 - x1) / 4, (y2 - y1) / 4
    return x1 + inset_x, y1 + inset_y, x2 - inset_x, y2 - inset_y


def demand_of(colour: str) -> str:
    """The need that any shape of the colour fulfils."""
    return f"Locate: a {colour} shape"


def target_shape(scene: Scene) -> Shape:
    """The shape that the expression means."""
    return next(shape for shape in scene.shapes if shape.box_xyxy == scene.box_xyxy)


def mask_of(shape: Shape, size: tuple[int, int]) -> np.ndarray:
    """Which pixels of an image of ``size`` (width, height) the shape paints: (height, width), true or false."""
    image = Image.new("RGB", size)
    _paint(ImageDraw.Draw(image), shape, (255, 255, 255))
    return np.asarray(image)[:, :, 0] > 0


def first_scene(split: str, index: int, seed: int, ask: Callable[[Scene], T | None]) -> T:
    """What `ask` makes of the scene number ``index`` of a split, or of the first in its place of which it makes
    something; a hundred are tried. The same arguments give the same.
    """
    for attempt in range(100):
        if asked := ask(make_scene(split, index, seed + attempt * 1_000_003)):
            return asked
    raise AssertionError(f"none of a hundred scenes will do for {split} {index}")


def make_path_scene(split: str, index: int, seed: int = 0) -> tuple[Scene, Shape, str]:
    """A scene, and another of its shapes with an expression for it: where a path from the scene's target may end."""
    rng = np.random.default_rng([len(SPLITS) + 1, SPLITS[split], seed, index])

    def find_end(scene: Scene) -> tuple[Scene, Shape, str] | None:
        for _ in range(20):
            named = _refer(rng, scene.shapes, scene.image.size, kinds=False)
            assert named is not None, f"{scene.id} refers to {scene.expression}"
            if named[0] != target_shape(scene):
                return scene, *named
        return None

    return first_scene(split, index, seed, find_end)


def loosen_box(rng: np.random.Generator, box_xyxy: Box, share: float, size: tuple[int, int]) -> Box:
    """The box as a hasty annotator draws it: each edge outside by up to ``share`` of its side, inside the image."""
    x1, y1, x2, y2 = box_xyxy
    out = rng.uniform(0, share, 4) * (x2 - x1, y2 - y1, x2 - x1, y2 - y1)
    xa, ya, xb, yb = round(x1 - out[0]), round(y1 - out[1]), round(x2 + out[2]), round(y2 + out[3])
    return max(xa, 0), max(ya, 0), min(xb, size[0]), min(yb, size[1])


def describe(shape: Shape, size: tuple[int, int], kinds: bool = False) -> str:
    """Colour and the ninth of the image that holds the centre: "red, top left", with ``kinds`` "red ring, top left"."""
    x, y = shape.centre
    column = ("left", "middle", "right")[min(int(3 * x / size[0]), 2)]
    row = ("top", "centre", "bottom")[min(int(3 * y / size[1]), 2)]
    what = f"{shape.colour} {shape.shape}" if kinds else shape.colour
    return f"{what}, {row} {column}"


def _generator(split: str, index: int, seed: int) -> np.random.Generator:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; generated scenes have {', '.join(SPLITS)}")
    return np.random.default_rng([SPLITS[split], seed, index])


def _draw(rng: np.random.Generator, fewest: int) -> tuple[Image.Image, tuple[Shape, ...]]:
    width, height = (int(side) for side in rng.integers(MIN_SIDE, MAX_SIDE + 1, 2))
    colours = rng.choice(list(COLOURS), 2, replace=False)
    kinds = rng.choice(SHAPES, 2, replace=False)
    shapes: list[Shape] = []
    wanted = int(rng.integers(fewest, MOST_SHAPES + 1))
    for _ in range(200):
        if len(shapes) == wanted:
            break
        side = int(min(width, height) * rng.uniform(0.28, 0.5))
        x, y = int(rng.integers(0, width - side + 1)), int(rng.integers(0, height - side + 1))
        shape = Shape(str(rng.choice(colours)), str(rng.choice(kinds)), (x, y, x + side, y + side))
        if not any(_touches(shape.box_xyxy, other.box_xyxy) for other in shapes):
            shapes.append(shape)
    image = Image.fromarray(_ground(rng, width, height))
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        red, green, blue = (int(np.clip(level + rng.integers(-12, 13), 0, 255)) for level in COLOURS[shape.colour])
        _paint(pen, shape, (red, green, blue))
    return image, tuple(shapes)


def _ground(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A grey ground lit from the right and tinted from warm (top) to cold, with noise.

    Qwen2.5-VL's tower has no absolute positions: the shading lets a tiny one tell where a patch is.
    """
    light = np.linspace(-70, 70, width)[None, :, None]
    tint = np.linspace(-28, 28, height)[:, None, None] * (-1.0, 0.0, 1.0)
    grey = 128 + rng.integers(-10, 11) + rng.normal(0, 4, (height, width, 1))
    return np.clip(grey + light + tint, 0, 255).astype(np.uint8)


def _paint(pen: ImageDraw.ImageDraw, shape: Shape, fill: tuple[int, int, int]) -> None:
    x1, y1, x2, y2 = shape.box_xyxy
    inclusive = (x1, y1, x2 - 1, y2 - 1)  # PIL paints the last row and column it is given
    if shape.shape == "square":
        pen.rectangle(inclusive, fill=fill)
    elif shape.shape == "ring":
        pen.ellipse(inclusive, outline=fill, width=shape.side // 4)
    else:
        inset = shape.side // 3
        pen.rectangle((x1 + inset, y1, x2 - 1 - inset, y2 - 1), fill=fill)
        pen.rectangle((x1, y1 + inset, x2 - 1, y2 - 1 - inset), fill=fill)


def _touches(a: Box, b: Box, gap: int = 3) -> bool:
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap


def _refer(
    rng: np.random.Generator, shapes: Sequence[Shape], size: tuple[int, int], kinds: bool
) -> tuple[Shape, str] | None:
    """A target and an expression true of it alone; comparisons are preferred to plain names two to one.

    None for a crowd of equals, none of which stands out by its place or size.
    """
    plain, compared = [], []
    for shape in shapes:
        for noun in _nouns(shape, kinds):
            group = [other for other in shapes if noun in _nouns(other, kinds)]
            if len(group) == 1:
                plain.append((shape, f"the {noun}"))
            else:
                compared += [(shape, f"the {word} {noun}") for word in _superlatives(shape, group, size)]
    pick = compared if compared and (not plain or rng.random() < 2 / 3) else plain
    return pick[rng.integers(len(pick))] if pick else None


def _nouns(shape: Shape, kinds: bool) -> tuple[str, ...]:
    names = (f"{shape.colour} shape",)
    return (f"{shape.colour} {shape.shape}", *names) if kinds else names


def _superlatives(shape: Shape, group: Sequence[Shape], size: tuple[int, int]) -> list[str]:
    """The words true of ``shape`` and, with a margin, of no other member of the group."""
    others = [other for other in group if other is not shape]
    x, y = (shape.centre[axis] / size[axis] for axis in (0, 1))
    xs, ys = ([other.centre[axis] / size[axis] for other in others] for axis in (0, 1))
    sides = [other.side for other in others]
    truths = {
        "left": x < min(xs) - PLACE_MARGIN,
        "right": x > max(xs) + PLACE_MARGIN,
        "top": y < min(ys) - PLACE_MARGIN,
        "bottom": y > max(ys) + PLACE_MARGIN,
        "small": shape.side * SIZE_MARGIN < min(sides),
        "large": shape.side > max(sides) * SIZE_MARGIN,
    }
    return [word for word, true in truths.items() if true]


def write_split(folder: Path, split: str, count: int, seed: int = 0) -> Path:
    """DIR/{split}.jsonl and its images; the file appears only when it is complete."""
    images = folder / split
    images.mkdir(parents=True, exist_ok=True)
    target = folder / f"{split}.jsonl"
    unfinished = target.with_suffix(".jsonl.part")
    with unfinished.open("w", encoding="utf-8") as lines:
        for index in range(count):
            scene = make_scene(split, index, seed)
            scene.image.save(images / f"{scene.id}.png")
            row = {
                "id": scene.id,
                "image": f"{split}/{scene.id}.png",
                "expression": scene.expression,
                "bbox_xyxy": list(scene.box_xyxy),
                "width": scene.image.width,
                "height": scene.image.height,
            }
            lines.write(json.dumps(row) + "\n")
    unfinished.replace(target)
    return target


def convert(options: Mapping[str, str]) -> list[str]:
    """Writes as the options say; the lines to print."""
    [out] = required(options, "out")
    split = options.get("split", "val")
    if split not in SPLITS:
        raise DataError(f"split is {split!r}; accepted: {', '.join(SPLITS)}")
    count, seed = whole_number(options, "count") or 200, whole_number(options, "seed", fewest=0) or 0
    return [str(write_split(Path(out), split, count, seed))]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, ("out", "split", "count", "seed"), convert, sys.argv[1:]))
