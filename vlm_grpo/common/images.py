"""Images from files."""

import io
from pathlib import Path

from PIL import Image

from vlm_grpo.common.errors import UserError

# What Pillow's readers of single formats raise for corrupt files, and what it raises for ones that are too large
UNREADABLE = (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError)


def open_image(image: object, what: str, mode: str = "RGB") -> Image.Image:
    """The image, fully decoded, in Pillow's `mode`. `image` is a path, the bytes of a file as BytesIO, or loaded.

    Raises: UserError, which begins with `what`, where it cannot be read or has no pixels.
    """
    if not isinstance(image, Image.Image | str | Path | io.BytesIO):
        raise UserError(f"{what} is a {type(image).__name__}; it must be a path or a PIL image")
    try:
        if isinstance(image, Image.Image):
            pixels = image.convert(mode)
        else:
            with Image.open(image) as opened:
                pixels = opened.convert(mode)
    except UNREADABLE as error:
        raise UserError(f"{what} cannot be read: {error}") from error
    if 0 in pixels.size:
        raise UserError(f"{what} has {pixels.width}×{pixels.height} pixels")
    return pixels
