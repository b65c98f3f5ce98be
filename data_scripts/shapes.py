"""Boxes, points and masks as data scripts check and store them."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_scripts.reading import DataError


def box_within(box: Sequence[float], size: tuple[int, int], tolerance: float) -> list[float] | None:
    """The box (x1, y1, x2, y2), cut to an image of `size` (width, height) if it leaves it by at most `tolerance`.

    Sides are rounded to a thousandth of a pixel. None if the box is empty or further outside.
    """
    x1, y1, x2, y2 = box
    inside = min(x1, y1) >= -tolerance and x2 <= size[0] + tolerance and y2 <= size[1] + tolerance
    cut = [max(x1, 0.0), max(y1, 0.0), min(x2, float(size[0])), min(y2, float(size[1]))]
    rounded = [round(side, 3) for side in cut]
    return rounded if inside and rounded[0] < rounded[2] and rounded[1] < rounded[3] else None


def mask_png(stored: Path | bytes | Mapping[str, Any]) -> bytes:
    """A mask as PNG of one channel, 255 inside and 0 outside.

    `stored` is an image file or its bytes (of several channels the first counts, inside is above half of the brightest
    value a pixel can have), or a COCO run-length encoding {"size": [height, width], "counts"}, compressed or not.

    Raises: DataError where it cannot be read.
    """
    try:
        inside = _decode_runs(stored) if isinstance(stored, Mapping) else _decode_image(stored)
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, Image.DecompressionBombError) as error:
        what = "a run-length encoding" if isinstance(stored, Mapping) else "an image"
        raise DataError(f"the mask is not {what} that can be read: {error!r}") from error
    buffer = io.BytesIO()
    Image.fromarray(np.where(inside, 255, 0).astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def _decode_image(stored: Path | bytes) -> np.ndarray:
    with Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored) as image:
        if image.mode == "1":
            return np.array(image)
        values = np.array(image.convert("RGB") if image.mode in ("P", "LA", "PA", "RGBA", "CMYK") else image)
    brightest = 255 if values.dtype == np.uint8 else 65535
    return (values if values.ndim == 2 else values[:, :, 0]) > brightest / 2


def _decode_runs(stored: Mapping[str, Any]) -> np.ndarray:
    height, width = (int(side) for side in stored["size"])
    counts = stored["counts"]
    counts = counts.encode() if isinstance(counts, str) else counts
    runs = _decompress(counts) if isinstance(counts, bytes) else [int(count) for count in counts]
    if min(runs, default=0) < 0 or sum(runs) != height * width:
        raise ValueError(f"the runs add up to {sum(runs)} pixels, not to {height} x {width}")
    values = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return values.reshape((width, height)).T  # COCO's runs go down the columns


def _decompress(counts: bytes) -> list[int]:
    """COCO's compressed runs: five bits a character from 48 on, a sixth where more follow, the fifth the sign.

    From the fourth run on, the difference from the run before the last is stored.
    """
    runs: list[int] = []
    value, shift = 0, 0
    for character in counts:
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value, shift = 0, 0
    if shift:
        raise ValueError("the runs end within a number")
    return runs
