"""Needs and the objects that fulfil them, to one JSONL per split.

    python -m data_scripts.demand out=DIR annotations=instances_val2017.json images=val2017 needs=needs.json split=val
    python -m data_scripts.demand out=DIR data=rows.jsonl images=FOLDER split=train
    python -m data_scripts.demand out=DIR scenes=512 split=val

From COCO's instances (or any file of its form; as it is, or in the annotations' .zip) and `needs`, a JSON object from
what someone says to the categories that fulfil it, {"I am thirsty.": ["cup", "bottle"]}: one row for each need and
image that has an object of such a category and one of another; crowds, and boxes without any area, are left out.

From `data`, a .jsonl, .json or .parquet file or a name on the hub, of rows {"image", "need", "objects": [{"label",
"bbox_xyxy", "fulfils"}]}, where "id" is optional and the image a path or bytes. `images` is the folder or .zip of the
images. `split` is the split as the hub calls it; "validation" is written as val. `scenes=N` draws N pictures of
coloured shapes, asked for by colour.

Each line of DIR/{split}.jsonl is {"id", "image", "need", "objects", "width", "height"}, boxes in pixels. Every image is
opened and every box checked against it. `limit=N` stops after N rows.
"""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_scripts.coco_detection import images_with_objects, load_instances, open_database
from data_scripts.shapes import box_within
from data_scripts.writing import (
    OUR_SPLITS,
    DataError,
    SplitWriter,
    image_bytes,
    image_source,
    load_hub,
    report,
    required,
    run_script,
    whole_number,
)
from tasks._generated.needs import scene_row
from tasks._generated.scenes import SPLITS, make_scene

OPTIONS = ("out", "annotations", "needs", "data", "images", "scenes", "split", "limit")
EDGE_TOLERANCE = 0.5  # pixels by which COCO's rounded boxes may leave their image; they are cut to it
Record = tuple[dict[str, Any], Path | tuple[str, bytes]]


def read_coco(options: Mapping[str, str], split: str) -> Iterator[Record]:
    """A row for each image and need that some, but not all, of its objects fulfil. Boxes are sorted on disk."""
    path, needs_path = (Path(value) for value in required(options, "annotations", "needs"))
    image_of = image_source(Path(required(options, "images")[0]))
    try:
        needs = {need: set(wanted) for need, wanted in json.loads(needs_path.read_text(encoding="utf-8-sig")).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{needs_path}: not an object from needs to lists of categories: {error}") from error
    with open_database(Path(options["out"]) / f"{split}.boxes.part") as database:
        load_instances(database, path, f"instances_{split}*.json")
        names = {name for (name,) in database.execute("SELECT name FROM categories")}
        unknown = sorted({name for wanted in needs.values() for name in wanted} - names)
        if unknown:
            raise DataError(f"{needs_path} names categories that {path} does not have: {', '.join(unknown)}")
        for image_id, name, _, objects in images_with_objects(database):
            for number, (need, wanted) in enumerate(needs.items()):
                things = [
                    {"label": one["label"], "bbox_xyxy": one["bbox_xyxy"], "fulfils": one["label"] in wanted}
                    for one in objects
                    if not one["iscrowd"]
                ]
                if len({thing["fulfils"] for thing in things}) == 2:
                    row_id = f"{split}-{image_id}-{number}"
                    yield {"id": row_id, "need": need, "objects": things}, image_of(name)


def read_rows(options: Mapping[str, str], split: str) -> Iterator[Record]:
    """Rows that are in our form already. Ids may stand in two splits, so images are named after the split, too."""
    source = options["data"]
    image_of = image_source(Path(options["images"])) if options.get("images") else Path
    for number, record in enumerate(load_hub(source, options.get("split", split))):
        row_id = str(record.get("id", f"{split}-{number}"))
        try:
            row = {"id": row_id, "need": record["need"], "objects": record["objects"]}
            stored = record["image"]
            yield row, image_of(stored) if isinstance(stored, str) else (f"{split}-{row_id}", image_bytes(stored))
        except KeyError as error:
            raise DataError(
                f"{source}, row {number}: the key {error} is missing; it has {', '.join(record)}"
            ) from error


def read_scenes(split: str, count: int) -> Iterator[Record]:
    """Generated scenes, as PNG."""
    if split not in SPLITS:
        raise DataError(f"split is {split!r}; generated scenes have {', '.join(SPLITS)}")
    for index in range(count):
        scene = make_scene(split, index)
        row = scene_row(scene)
        file = io.BytesIO()
        scene.image.save(file, "png")
        yield {key: row[key] for key in ("id", "need", "objects")}, (scene.id, file.getvalue())


def convert(options: Mapping[str, str]) -> list[str]:
    """Reads, checks and writes as the options say; the lines to print."""
    out = Path(required(options, "out")[0])
    sources = [name for name in ("annotations", "data", "scenes") if options.get(name)]
    if len(sources) != 1:
        raise DataError(f"give one of annotations=…, data=…, scenes=…; given: {', '.join(sources) or 'none'}")
    split = options.get("split", "val")
    split = OUR_SPLITS.get(split, split)
    if sources == ["annotations"]:
        records = read_coco(options, split)
    elif sources == ["data"]:
        records = read_rows(options, split)
    else:
        records = read_scenes(split, whole_number(options, "scenes") or 1)
    with SplitWriter(out, whole_number(options, "limit")) as writer:
        for row, stored in records:
            if not writer.take(split, row["id"]):
                break
            image = writer.image(stored)
            if image and _check(writer, row, image.size):
                size = {"width": image.size[0], "height": image.size[1]}
                writer.write(split, {"id": row["id"], "image": image.path, **row, **size})
    return report(writer.counts, {}, writer.limit, "needs", every=False)


def _four(sides: Any) -> list[float]:
    x1, y1, x2, y2 = (float(side) for side in sides)
    return [x1, y1, x2, y2]


def _check(writer: SplitWriter, row: dict[str, Any], size: tuple[int, int]) -> bool:
    """Whether the row is sound; its boxes are cut to the image, and what is wrong is noted."""
    try:
        objects = [
            {
                "label": str(thing["label"]),
                "bbox_xyxy": _four(thing["bbox_xyxy"]),
                "fulfils": bool(thing["fulfils"]),
            }
            for thing in row["objects"]
        ]
    except (KeyError, TypeError, ValueError):
        writer.problems.add("rows whose objects are not of the form label, bbox_xyxy, fulfils", row["id"])
        return False
    kept = []
    for thing in objects:
        cut = box_within(thing["bbox_xyxy"], size, EDGE_TOLERANCE)
        if cut is None:
            writer.problems.add(
                "boxes that are empty or leave their image", f"{row['id']}: {thing['bbox_xyxy']} in {size}"
            )
            return False
        kept.append({**thing, "bbox_xyxy": cut})
    if not any(thing["fulfils"] for thing in kept) or not str(row["need"]).strip():
        writer.problems.add("rows without a need, or whose need no object fulfils", row["id"])
        return False
    row["objects"] = kept
    return True


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
