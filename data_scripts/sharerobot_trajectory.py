"""ShareRobot's trajectories, from their own files or GRPO-MA's manifests, to one JSONL.

    python -m data_scripts.sharerobot_trajectory out=DIR annotations=trajectory/trajectory.json \\
        images=trajectory/images split=train
    python -m data_scripts.sharerobot_trajectory out=DIR images=DATA_ROOT \\
        annotations=GRPO-MA-data/grpo_sharerobot_trajectory_train.json
    python -m data_scripts.sharerobot_trajectory out=DIR annotations=whcpumpkin/GRPO-MA-data images=DATA_ROOT

`annotations` is a JSON array (a file, in a .zip or .gz or not, or a data set's name on the hub) of one of two forms:
  - BAAI/ShareRobot: {"id", "image_path", "instruction", "meta_data": {"original_dataset", "original_width",
    "original_height"}, "points": [[x, y], …]} (or "trajectory" for the points; the id is the image's path where there
    is no image_path). If the stored image has another size than the original, points are scaled to it;
  - whcpumpkin/GRPO-MA-data: {"id"?, "image", "question", "question_type": "trajectory-sharerobot", "answer": [[x, y],
    …]}, points in pixels of the image, image paths from data_root. Records of other question types are left out.
`images` is the folder (or a .zip) that image paths start from, `split` (train) names the file, `limit=N` stops after N.

Each line of DIR/{split}.jsonl is {"id", "image", "points", "width", "height"} with "instruction", or "question" as it
stands in the manifest: the image's path from DIR, the points in pixels of that image. Points up to five pixels outside
the image are moved to its edge; those further out, and paths of fewer than three points, are reported.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_scripts.sharerobot_affordance import read_entries, read_record, scale_of
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_source,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"train": 6870}  # BAAI/ShareRobot, as its card counts
OFFICIAL_MANIFEST = {"train": 3435}  # whcpumpkin/GRPO-MA-data, training records
QUESTION_TYPE = "trajectory-sharerobot"
FEWEST_POINTS = 3
EDGE_TOLERANCE = 5.0  # pixels by which a point may leave its image
OPTIONS = ("out", "annotations", "images", "split", "limit")


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, annotations, images = required(options, "out", "annotations", "images")
    split, read_image = options.get("split", "train"), image_source(Path(images))
    others, manifests = 0, 0
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for number, entry in enumerate(read_entries(annotations, split)):
            where, row_id = f"{annotations}: record {number}", f"{split}-{number:06d}"
            if not isinstance(entry, dict):
                raise DataError(f"{where} is a {type(entry).__name__}; it must be an object.")
            if (entry.get("question_type") or QUESTION_TYPE) != QUESTION_TYPE:
                others += 1
                continue
            if not writer.take(split, row_id):
                break
            is_manifest = entry.get("question") is not None
            manifests += is_manifest
            name, asked, points = _manifest(entry, where) if is_manifest else _own(entry, where)
            image = writer.image(read_image(name))
            if image is None:
                continue
            if not is_manifest:
                scale = scale_of(read_record(entry, where), image.size)
                points = [(x * scale[0], y * scale[1]) for x, y in points]
            inside = _within(points, image.size)
            if inside is None or len(points) < FEWEST_POINTS:
                kind = "paths that leave their image" if inside is None else f"paths of under {FEWEST_POINTS} points"
                writer.problems.add(kind, f"{where}: {points} in {image.size}")
                continue
            row = {"id": row_id, "image": image.path, "points": inside} | asked
            writer.write(split, row | {"width": image.size[0], "height": image.size[1]})
    official = OFFICIAL_MANIFEST if manifests else OFFICIAL
    lines = report(writer.counts, official, writer.limit, "paths", every=False)
    return [*lines, f"{others:,} records of other question types left out"] if others else lines


def _own(entry: Mapping[str, Any], where: str) -> tuple[str, dict[str, str], list[tuple[float, float]]]:
    record = read_record(entry, where)
    return (
        record.image,
        {"instruction": record.instruction},
        _points(entry.get("points") or entry.get("trajectory"), where),
    )


def _manifest(entry: Mapping[str, Any], where: str) -> tuple[str, dict[str, str], list[tuple[float, float]]]:
    image, question = entry.get("image"), entry["question"]
    if not isinstance(image, str) or not isinstance(question, str):
        raise DataError(f"{where}: image is {image!r} and question {question!r}; both must be text.")
    return image, {"question": question.replace("<image>", "").strip()}, _points(entry.get("answer"), where)


def _points(stored: Any, where: str) -> list[tuple[float, float]]:
    try:
        points = [(float(x), float(y)) for x, y in stored]
        if not all(math.isfinite(value) for point in points for value in point):
            raise ValueError("not all of them are finite")
        return points
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: the points must be [[x, y], …] in pixels: {error}") from error


def _within(points: list[tuple[float, float]], size: tuple[int, int]) -> list[list[float]] | None:
    """The points, moved to the image's edge where they are just outside; None if one is further out."""
    inside = [[round(min(max(value, 0.0), side), 3) for value, side in zip(p, size, strict=True)] for p in points]
    moved = max((abs(a - b) for p, q in zip(points, inside, strict=True) for a, b in zip(p, q, strict=True)), default=0)
    return inside if moved <= EDGE_TOLERANCE else None


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
