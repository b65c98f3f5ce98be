"""Generated scenes: coloured shapes, an expression that refers to one of them, and its exact box.

A scene is a pure function of (split, index, seed); splits draw from disjoint random streams. Every scene holds several
similar shapes, so that most expressions need a comparison ("the small red shape", "the left blue shape"). Boxes are
continuous xyxy in pixels of the generated image: painted columns are x1 to x2 - 1, painted rows y1 to y2 - 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

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
    """One image and one expression. ``thought`` is a reference thought: roughly what the target is and where it is."""

    id: str
    image: Image.Image
    expression: str
    box_xyxy: Box
    thought: str
    shapes: tuple[Shape, ...]


def make_scene(split: str, index: int, seed: int = 0, fewest: int = FEWEST_SHAPES, kinds: bool = False) -> Scene:
    """Scene number ``index`` of a split, with at least ``fewest`` shapes. The same arguments give the same scene.

    With ``kinds``, expression and thought may say ring, square or cross; otherwise they only say shape.
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


def middle_of(box: Sequence[float]) -> tuple[float, float, float, float]:
    """The box of half the width and half the height around the centre of a box.

    >>> middle_of((10, 20, 30, 60))
    (15.0, 30.0, 25.0, 50.0)
    """
    x1, y1, x2, y2 = box
    inset_x, inset_y = (x2 - x1) / 4, (y2 - y1) / 4
    return x1 + inset_x, y1 + inset_y, x2 - inset_x, y2 - inset_y


def target_shape(scene: Scene) -> Shape:
    """The shape that the expression means."""
    return next(shape for shape in scene.shapes if shape.box_xyxy == scene.box_xyxy)


def mask_of(shape: Shape, size: tuple[int, int]) -> np.ndarray:
    """The pixels that the shape paints in an image of ``size`` (width, height): a (height, width) array of bools."""
    image = Image.new("RGB", size)
    _paint(ImageDraw.Draw(image), shape, (255, 255, 255))
    return np.asarray(image)[:, :, 0] > 0


def first_scene(split: str, index: int, seed: int, ask: Callable[[Scene], T | None]) -> T:
    """The result of ``ask`` for scene number ``index`` of a split.

    If ``ask`` returns None, other scenes take its place until one gives a result; at most a hundred are tried. The same
    arguments give the same result.
    """
    for attempt in range(100):
        if asked := ask(make_scene(split, index, seed + attempt * 1_000_003)):
            return asked
    raise AssertionError(f"none of a hundred scenes will do for {split} {index}")


def make_path_scene(split: str, index: int, seed: int = 0) -> tuple[Scene, Shape, str]:
    """A scene, another of its shapes, and an expression for that shape: a path may lead from the target to it."""
    rng = np.random.default_rng([len(SPLITS) + 1, SPLITS[split], seed, index])

    def find_end(scene: Scene) -> tuple[Scene, Shape, str] | None:
        for _ in range(20):
            named = _refer(rng, scene.shapes, scene.image.size, kinds=False)
            assert named is not None, f"{scene.id} refers to {scene.expression}"
            if named[0] != target_shape(scene):
                return scene, *named
        return None

    return first_scene(split, index, seed, find_end)


def describe(shape: Shape, size: tuple[int, int], kinds: bool = False) -> str:
    """The shape's colour and the ninth of the image with its centre: "red, top left"; "red ring, …" with ``kinds``."""
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

    Qwen2.5-VL's vision tower has no absolute positions; the shading tells a tiny model where a patch is.
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
    """A target and an expression that is true of it only. Comparisons are preferred to plain names two to one.

    None if the shapes are equal and none differs by its place or size.
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
    """The words that are true of ``shape`` and, by a margin, of no other shape in the group."""
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
