"""COCO's boxes (instances_{train,val}2017.json) to one JSONL, one line per image.

    python -m data_scripts.coco_detection out=DIR annotations=instances_val2017.json images=val2017 split=val
    python -m data_scripts.coco_detection out=DIR annotations=annotations_trainval2017.zip images=val2017.zip split=val

`annotations` is the JSON file, or the archive it is in, then instances_{split}2017.json is read. `images` is the folder
of the images or its archive, `split` names the output (train, val), `limit=N` stops after N images with objects. The
file is read three times as a stream and its boxes are sorted on disk, so that memory does not grow with it. Boxes
without any area are counted and left out, and so are images without an object that is no crowd.

Each line of DIR/{split}.jsonl is {"id", "image", "image_id", "width", "height", "objects"}; an object is {"id",
"category_id", "label", "bbox_xyxy", "area", "iscrowd"}, the box in pixels of that image, the area that of its outline.
"""

import contextlib
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_scripts.shapes import box_within
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_source,
    known_split,
    read_json_array,
    report,
    required,
    run_script,
    some,
    whole_number,
)

OFFICIAL = {"train": 118287, "val": 5000}  # images of the file, with or without objects
EDGE_TOLERANCE = 1.0  # pixels by which a box may leave its image; it is cut to it
OPTIONS = ("out", "annotations", "images", "split", "limit")


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, annotations, images, split = required(options, "out", "annotations", "images", "split")
    known_split(options, OFFICIAL)
    read_image = image_source(Path(images))
    sorting = Path(out) / f"{split}.boxes.part"
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer, open_database(sorting) as database:
        left_out = load_instances(database, Path(annotations), f"instances_{split}*.json")
        for image_id, name, size, objects in images_with_objects(database):
            row_id = f"{split}-{image_id}"
            if not writer.take(split, row_id):
                break
            image = writer.image(read_image(name))
            if image is None:
                continue
            if image.size != size:
                writer.problems.add("images of another size than the annotations say", f"{name} ({image.size})")
                continue
            outside = [o["id"] for o in objects if box_within(o["bbox_xyxy"], size, EDGE_TOLERANCE) is None]
            if outside:
                writer.problems.add("boxes that leave their image", f"{name}: annotations {some(outside)}")
                continue
            objects = [o | {"bbox_xyxy": box_within(o["bbox_xyxy"], size, EDGE_TOLERANCE)} for o in objects]
            row = {"id": row_id, "image": image.path, "image_id": image_id, "width": size[0], "height": size[1]}
            writer.write(split, row | {"objects": objects})
        total = database.execute("SELECT count(*) FROM images").fetchone()[0]
    written = report(writer.counts, {}, writer.limit, "images with objects")
    known = f"official {OFFICIAL[split]:,}" if split in OFFICIAL else "no official count known"
    differs = "" if total == OFFICIAL.get(split, total) else ", DIFFERS"
    return [*written, f"{split}: {total:,} images in the file ({known}{differs})", *left_out]


@contextlib.contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """An empty database on disk, for as long as the block runs."""
    path.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            yield database
    finally:
        path.unlink(missing_ok=True)


def load_instances(database: sqlite3.Connection, path: Path, member: str) -> list[str]:
    """Images, categories and boxes of the file as tables; what was left out, as lines to print."""
    database.executescript(
        "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
        "CREATE TABLE images (id INTEGER PRIMARY KEY, place INTEGER, name TEXT, width INTEGER, height INTEGER);"
        "CREATE TABLE categories (id INTEGER PRIMARY KEY, name TEXT);"
        "CREATE TABLE boxes (id INTEGER, image INTEGER, category INTEGER, x REAL, y REAL, w REAL, h REAL, area REAL,"
        " crowd INTEGER);"
    )
    empty = 0

    def boxes() -> Iterator[tuple[Any, ...]]:
        nonlocal empty
        for entry in read_json_array(path, "annotations.item", member):
            x, y, w, h = (float(side) for side in entry["bbox"])
            if w <= 0 or h <= 0:
                empty += 1
                continue
            ids = entry["id"], entry["image_id"], entry["category_id"]
            yield *ids, x, y, w, h, float(entry.get("area", w * h)), int(entry.get("iscrowd", 0))

    def of(prefix: str) -> Iterator[Any]:
        return read_json_array(path, f"{prefix}.item", member)

    try:
        images = ((e["id"], n, e["file_name"], e["width"], e["height"]) for n, e in enumerate(of("images")))
        database.executemany("INSERT INTO images VALUES (?, ?, ?, ?, ?)", images)
        database.executemany("INSERT INTO categories VALUES (?, ?)", ((e["id"], e["name"]) for e in of("categories")))
        database.executemany("INSERT INTO boxes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", boxes())
    except (KeyError, TypeError, ValueError, sqlite3.Error) as error:
        raise DataError(f"{path} is not in the form of COCO's instances: {error!r}") from error
    lost = database.execute(
        "SELECT count(*) FROM boxes WHERE image NOT IN (SELECT id FROM images)"
        " OR category NOT IN (SELECT id FROM categories)"
    ).fetchone()[0]
    if lost:
        raise DataError(f"{path}: {lost} annotations are of images or categories that it lacks: it is incomplete.")
    database.execute("CREATE INDEX by_image ON boxes (image)")
    return [f"{empty:,} boxes without any area left out"] if empty else []


Annotated = tuple[int, str, tuple[int, int], list[dict[str, Any]]]


def images_with_objects(database: sqlite3.Connection) -> Iterator[Annotated]:
    """Id, file name, size and objects of the images that have an object that is no crowd, in the file's order."""
    wanted = "id IN (SELECT image FROM boxes WHERE crowd = 0)"
    images = database.execute(f"SELECT id, name, width, height FROM images WHERE {wanted} ORDER BY place")
    for image_id, name, width, height in images:
        rows = database.execute(
            "SELECT boxes.id, category, name, x, y, w, h, area, crowd FROM boxes JOIN categories"
            " ON categories.id = category WHERE image = ? ORDER BY boxes.rowid",
            (image_id,),
        )
        objects = [
            {"id": i, "category_id": c, "label": label, "bbox_xyxy": [x, y, x + w, y + h], "area": a, "iscrowd": crowd}
            for i, c, label, x, y, w, h, a, crowd in rows
        ]
        yield image_id, name, (width, height), objects


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
