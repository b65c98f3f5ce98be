"""Where2Place, RefSpatial-Bench and RoboAfford-Eval, questions answered by points in a mask, to one JSONL.

    python -m data_scripts.point_affordance out=DIR source=where2place/point_questions.jsonl split=where2place
    python -m data_scripts.point_affordance out=DIR source=RefSpatial-Bench/Location/question.json split=location
    python -m data_scripts.point_affordance out=DIR source=BAAI/RefSpatial-Bench split=location
    python -m data_scripts.point_affordance out=DIR source=RoboAfford/annotations_absxy.json split=roboafford

`source` is one of
  - Where2Place's (wentao-yuan/where2place) point_questions.jsonl: {"question_id", "image", "text"}; the images lie in
    images/ and the masks in masks/ beside it, named after the number of the line (00.jpg), or else after the image;
  - RefSpatial-Bench's (BAAI/RefSpatial-Bench) question.json: an array of {"id", "object", "prompt", "suffix",
    "rgb_path", "mask_path", "step"}, paths starting from its folder;
  - RoboAfford-Eval's annotations_absxy.json or annotations_normxy.json: an array of {"img", "mask", "question",
    "category"}, paths starting from images/ and masks/ beside it, or from the folder of the two;
  - rows with columns `image` and `mask`, and `prompt`, `question` or `text`: a data set's name on the hub, a folder of
    parquet files or of `save_to_disk`, or a .parquet file.
`images` and `masks` are other folders of them. A mask is an image file (PNG, JPEG), or in place of its path a COCO
run-length encoding {"size", "counts"}. `split` names the file (and the split on the hub), `limit=N` stops after N.

Each line of DIR/{split}.jsonl is {"id", "image", "mask", "question", "group", "width", "height"}. The mask is written
as a PNG of 0 and 255 to DIR/images. The words about the answer's format ("Your answer should be formatted …") are
cut off. `group` is RefSpatial's "step N" or RoboAfford's category.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_scripts.shapes import mask_png
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_bytes,
    load_hub,
    read_json_array,
    read_jsonl,
    report,
    required,
    run_script,
    whole_number,
)

# Questions, as the data sets' cards and RoboAfford's paper (arXiv 2511.12436) count them
OFFICIAL = {"where2place": 100, "location": 100, "placement": 100, "unseen": 77, "roboafford": 338}
OPTIONS = ("out", "source", "images", "masks", "split", "limit")
_FORMAT = re.compile(r"\s*Your answer should be formatted\b.*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """One question: an image as its path or bytes, a mask as its path, bytes or run-length encoding."""

    image: Path | bytes
    mask: Path | bytes | Mapping[str, Any]
    text: str
    group: str = ""


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, source, split = required(options, "out", "source", "split")
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for number, question in enumerate(read_questions(source, split, options)):
            row_id = f"{split}-{number:05d}"
            if not writer.take(split, row_id):
                break
            image = writer.image(question.image if isinstance(question.image, Path) else (row_id, question.image))
            if isinstance(question.mask, Path) and not question.mask.is_file():
                writer.problems.add("masks missing", str(question.mask))
                continue
            try:
                mask = writer.image((f"masks/{row_id}", mask_png(question.mask)))
            except DataError as error:
                writer.problems.add("masks that cannot be read", f"{row_id}: {error}")
                continue
            if image is None or mask is None:
                continue
            if image.size != mask.size:
                writer.problems.add("masks of another size than their image", f"{row_id} ({mask.size}, {image.size})")
                continue
            if not _has_inside(Path(out) / mask.path):
                writer.problems.add("masks without any pixel inside", row_id)
            row = {"id": row_id, "image": image.path, "mask": mask.path, "question": question.text}
            size = {"width": image.size[0], "height": image.size[1]}
            writer.write(split, row | {"group": question.group} | size)
    return report(writer.counts, OFFICIAL, writer.limit, "questions", every=False)


def read_questions(source: str, split: str, options: Mapping[str, str]) -> Iterator[Question]:
    """The questions of a source, whichever benchmark's form it has."""
    path = Path(source)
    if path.suffix in (".json", ".jsonl"):
        rows = read_jsonl(path) if path.suffix == ".jsonl" else read_json_array(path)
    else:
        rows = load_hub(source, split)
    images = Path(options.get("images") or path.parent / "images")
    masks = Path(options.get("masks") or path.parent / "masks")
    for number, row in enumerate(rows):
        where = f"{source}: row {number}"
        try:
            yield _question(row, number, path.parent, images, masks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{where} is in the form of none of the three benchmarks: {error!r}") from error


def _question(row: Mapping[str, Any], number: int, folder: Path, images: Path, masks: Path) -> Question:
    if "rgb_path" in row:
        mask = row["mask_path"]
        mask = mask if isinstance(mask, Mapping) else folder / mask
        return Question(folder / row["rgb_path"], mask, _cut(row["prompt"]), _step(row))
    if "img" in row:
        mask = row["mask"]
        mask = mask if isinstance(mask, Mapping) else _below(masks, mask, ("mask", "masks"))
        return Question(
            _below(images, row["img"], ("image", "images")), mask, _cut(row["question"]), str(row.get("category") or "")
        )
    text = row.get("prompt") or row.get("question") or row["text"]
    if isinstance(row["image"], str):
        mask = row.get("mask") or _where2place_mask(masks, row["image"], number)
        mask = masks / mask if isinstance(mask, str) else mask
        return Question(images / row["image"], mask, _cut(text), str(row.get("category") or ""))
    return Question(image_bytes(row["image"]), image_bytes(row["mask"]), _cut(text), _step(row))


def _cut(text: str) -> str:
    return _FORMAT.sub("", text).strip()


def _step(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}" if row.get("step") is not None else str(row.get("category") or "")


def _below(folder: Path, name: str, own: tuple[str, ...]) -> Path:
    """The file of that name in a folder, whose own name, or one of `own`, may stand before it ("./images/1.jpg")."""
    path, (first, *rest) = folder / name, Path(name).parts
    return folder.joinpath(*rest) if rest and first in (folder.name, *own) and not path.is_file() else path


def _where2place_mask(masks: Path, image: str, number: int) -> Path:
    """The mask of the row's number, as Where2Place's own evaluation takes it, or else of the image's name."""
    names = [f"{number:02d}", Path(image).stem]
    candidates = [masks / f"{name}{suffix}" for name in names for suffix in (".jpg", ".png")]
    found = [path for path in candidates if path.is_file()]
    return found[0] if found else candidates[0]


def _has_inside(path: Path) -> bool:
    from PIL import Image

    with Image.open(path) as image:
        return image.getbbox() is not None


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
