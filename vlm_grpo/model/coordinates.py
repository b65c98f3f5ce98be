"""Converts boxes and points between pixels of the original image and the coordinates that a model speaks.

No other module does. The coordinate space is a fact of the model family, and both image sizes come from the image and
its processor: the meaning of a number is never guessed from its magnitude.
"""

from collections.abc import Callable

from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring.located import find_coordinates
from vlm_grpo.tree.types import CoordinateSpace, Prompt

Size = tuple[int, int]


def answer_in_original(prompt: Prompt, answer: str) -> str:
    """The answer with its boxes and points in pixels of the original image, as the task scores it."""
    if prompt.coordinates is None:
        return answer
    return to_original(answer, prompt.coordinates, prompt.original_sizes[0], prompt.resized_sizes[0])


def answer_in_model(prompt: Prompt, answer: str) -> str:
    """A task's answer with its boxes and points in the model's coordinates, as the model should write it."""
    if prompt.coordinates is None:
        return answer
    return to_model(answer, prompt.coordinates, prompt.original_sizes[0], prompt.resized_sizes[0])


def to_model(text: str, space: CoordinateSpace, original_size: Size, resized_size: Size) -> str:
    """Converts boxes and points of a text from original pixels to the model's space; all other text stays.

    Sizes are (width, height) in pixels. RESIZED_PIXELS and THOUSAND give integers, UNIT gives three decimals.

    >>> to_model("What is at [60, 50, 120, 100]?", CoordinateSpace.THOUSAND, (120, 200), (112, 196))
    'What is at [500, 250, 1000, 500]?'
    """
    scale_x, scale_y = _units_per_pixel(space, original_size, resized_size)
    form = _decimals(3) if space is CoordinateSpace.UNIT else _decimals(0)
    return _rewrite(text, lambda value, axis: form(value * (scale_x if axis == "x" else scale_y)))


def to_original(text: str, space: CoordinateSpace, original_size: Size, resized_size: Size) -> str:
    """Converts boxes and points of a text from the model's space to original pixels, with up to two decimals.

    >>> to_original("(500,250),(1000,500)", CoordinateSpace.THOUSAND, (120, 200), (112, 196))
    '(60,50),(120,100)'
    """
    scale_x, scale_y = _units_per_pixel(space, original_size, resized_size)
    form = _decimals(2)
    return _rewrite(text, lambda value, axis: form(value / (scale_x if axis == "x" else scale_y)))


def instruction(space: CoordinateSpace, resized_size: Size) -> str:
    """The sentence of the prompt that tells the model which coordinates to read and write."""
    match space:
        case CoordinateSpace.RESIZED_PIXELS:
            width, height = resized_size
            return f"Coordinates are integer pixels of the image, which is {width} wide and {height} high."
        case CoordinateSpace.THOUSAND:
            return "Coordinates are integers from 0 to 1000, relative to the width and height of the image."
        case CoordinateSpace.UNIT:
            return "Coordinates are decimals from 0 to 1, relative to the width and height of the image."


def _units_per_pixel(space: CoordinateSpace, original_size: Size, resized_size: Size) -> tuple[float, float]:
    """Model units per original pixel, along x and along y."""
    width, height = original_size
    if width <= 0 or height <= 0 or resized_size[0] <= 0 or resized_size[1] <= 0:
        raise UserError(
            f"an image of {width}x{height} pixels, resized to {resized_size[0]}x{resized_size[1]}, is empty."
        )
    match space:
        case CoordinateSpace.RESIZED_PIXELS:
            return resized_size[0] / width, resized_size[1] / height
        case CoordinateSpace.THOUSAND:
            return 1000 / width, 1000 / height
        case CoordinateSpace.UNIT:
            return 1 / width, 1 / height


def _rewrite(text: str, convert: Callable[[float, str], str]) -> str:
    pieces: list[str] = []
    done = 0
    for located in find_coordinates(text):
        for start, end, value, axis in located.coordinates:
            pieces += [text[done:start], convert(value, axis)]
            done = end
    return "".join([*pieces, text[done:]])


def _decimals(most: int) -> Callable[[float], str]:
    """A function that formats numbers with up to `most` decimals, without trailing zeros and negative zeros."""

    def form(value: float) -> str:
        digits = f"{value:.{most}f}"
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return "0" if digits == "-0" else digits

    return form
