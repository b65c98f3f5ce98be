"""ShareRobot's affordance annotations (BAAI/ShareRobot on the hub) to one JSONL.

    python -m data_scripts.sharerobot_affordance out=DIR annotations=affordance/affordance.json \\
        images=affordance/images split=train

`annotations` is a JSON array (a file, in a .zip or .gz or not, or a data set's name on the hub) of {"id", "image_path",
"instruction", "meta_data": {"original_dataset", "original_width", "original_height"}, "affordance": {"x", "y", "width",
"height"}}; where there is no image_path, the id is the image's path. The box is in pixels of an image of the original
size; if the stored image has another size it is scaled to that. The conversations of BAAI/ShareRobot-Bench, which do
not say the unit of their numbers, are not read.
`images` is the folder (or a .zip) of the images, `split` (train) names the file, `limit=N` stops after N.

Each line of DIR/{split}.jsonl is {"id", "image", "instruction", "bbox_xyxy", "width", "height", "source"}: the image's
path from DIR, the box in pixels of that image, the data set it comes from.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_scripts.shapes import box_within
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_source,
    load_hub,
    read_json_array,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"train": 6522}  # all images with an affordance, as the data set's card counts them
OPTIONS = ("out", "annotations", "images", "split", "limit")
EDGE_TOLERANCE = 1.0  # pixels by which a box may leave its image; it is cut to it


def read_entries(annotations: str, split: str) -> Iterator[Any]:
    """The objects of a JSON array in a file, or the rows of a split on the hub."""
    path = Path(annotations)
    return read_json_array(path) if path.suffix in (".json", ".zip", ".gz") else load_hub(annotations, split)


@dataclass(frozen=True)
class Record:
    """What both of ShareRobot's forms say about an image: `size` is the original width and height, if given."""

    image: str
    instruction: str
    source: str
    size: tuple[int, int] | None


def read_record(record: Any, where: str) -> Record:
    """The fields that affordances and trajectories share. Raises DataError for a record of another form."""
    try:
        meta = record.get("meta_data") or {}
        size = (int(meta["original_width"]), int(meta["original_height"])) if meta.get("original_width") else None
        image, instruction = record.get("image_path") or record["id"], record["instruction"]
        if not isinstance(image, str) or not isinstance(instruction, str):
            raise ValueError(f"image {image!r} and instruction {instruction!r} must be text")
        if size is not None and min(size) < 1:
            raise ValueError(f"the original size is {size}")
        return Record(image, instruction.strip().rstrip("."), str(meta.get("original_dataset", "")), size)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where} is not in ShareRobot's form (id, image_path, instruction, meta_data): {error!r}"
        ) from error


def scale_of(record: Record, size: tuple[int, int]) -> tuple[float, float]:
    """Pixels of the stored image of `size` per pixel of the original, along x and y."""
    return (size[0] / record.size[0], size[1] / record.size[1]) if record.size else (1.0, 1.0)


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, annotations, images = required(options, "out", "annotations", "images")
    split, read_image = options.get("split", "train"), image_source(Path(images))
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for number, entry in enumerate(read_entries(annotations, split)):
            where = f"{annotations}: record {number}"
            row_id = f"{split}-{number:06d}"
            if not writer.take(split, row_id):
                break
            record = read_record(entry, where)
            box = _box(entry, where)
            image = writer.image(read_image(record.image))
            if image is None:
                continue
            scale = scale_of(record, image.size)
            cut = box_within([side * scale[at % 2] for at, side in enumerate(box)], image.size, EDGE_TOLERANCE)
            if cut is None:
                writer.problems.add("boxes that are empty or leave their image", f"{where}: {box} in {record.size}")
                continue
            row = {"id": row_id, "image": image.path, "instruction": record.instruction, "bbox_xyxy": cut}
            writer.write(split, row | {"width": image.size[0], "height": image.size[1], "source": record.source})
    return report(writer.counts, OFFICIAL, writer.limit, "boxes", every=False)


def _box(entry: Any, where: str) -> tuple[float, float, float, float]:
    try:
        x, y, width, height = (float(entry["affordance"][key]) for key in ("x", "y", "width", "height"))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: the affordance must be {{x, y, width, height}} in pixels: {error!r}") from error
    return x, y, x + width, y + height


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
