"""Reads images from files."""

import io
from pathlib import Path

from PIL import Image

from vlm_grpo.common.errors import UserError

# Exceptions that Pillow raises for corrupt files and for files that are too large
UNREADABLE = (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError)


def open_image(image: object, what: str, mode: str = "RGB") -> Image.Image:
    """The image, fully decoded, in Pillow's `mode`. `image` is a path, a file's bytes as BytesIO, or a Pillow image.

    Raises: UserError where the image cannot be read or has no pixels; its message begins with `what`.
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
