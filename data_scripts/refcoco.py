"""RefCOCO, RefCOCO+ and RefCOCOg from their published forms to one JSONL per split.

    python -m data_scripts.refcoco out=DIR annotations=refcoco/refs(unc).p images=train2014
    python -m data_scripts.refcoco out=DIR annotations=rec_jsons_processed/refcoco_train.jsonl images=coco split=train
    python -m data_scripts.refcoco out=DIR annotations=rec_jsons_processed/refcoco_val.json images=coco split=val
    python -m data_scripts.refcoco out=DIR annotations=lmms-lab/RefCOCO split=testA

`annotations` is one of
  - refs(unc|umd|google).p, with instances.json beside it: every split in it is written;
  - a file of VLM-R1's, x2 and y2 one pixel further than COCO's: a JSON array (image, problem, solution; its evaluation
    files) or JSONL ({"image", "conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}]}, the box a list
    or a text of four numbers; its training files);
  - rows of lmms-lab/RefCOCO*: the repository's name, a folder of `save_to_disk`, or a .parquet file. Some splits there
    are no standard ones, which is printed.
`images` is the folder that holds the images; rows of lmms-lab bring their own, which are written to DIR/images.

Each line of DIR/{split}.jsonl is {"id", "image", "expression", "bbox_xyxy", "width", "height"}: the image's path from
DIR, the box in pixels of that image. Every image is opened and every box checked against it; a file appears only when
it is complete. `limit=N` stops after N expressions of a split; `dataset` (refcoco, refcoco+, refcocog) chooses the
official counts to compare with, where the path does not tell.
"""

import itertools
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_scripts import writing
from data_scripts.shapes import box_within
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_bytes,
    known_split,
    load_hub,
    read_json_array,
    read_jsonl,
    require,
    required,
    run_script,
    some,
    whole_number,
)
from tasks._hub_rows import lmms_notes

# Expressions per split. RefCOCOg's are those of the umd partition.
OFFICIAL = {
    "refcoco": {"train": 120624, "val": 10834, "testA": 5657, "testB": 5095},
    "refcoco+": {"train": 120191, "val": 10758, "testA": 5726, "testB": 4889},
    "refcocog": {"train": 80512, "val": 4896, "test": 9602},
}
EDGE_TOLERANCE = 0.5  # pixels by which COCO's rounded boxes may leave their image; they are cut to it


@dataclass(frozen=True)
class Row:
    """One expression. `image` is a path to read, or the bytes of an image with the name to write it under.

    `size` is the width and height that the annotations claim for the image, where they do.
    """

    id: str
    split: str
    image: Path | tuple[str, bytes]
    expression: str
    box_xyxy: tuple[float, float, float, float]
    size: tuple[int, int] | None = None


# ---- reading ----


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, tuples, strings and numbers. A pickle that asks for anything else is refused unread."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise DataError(
            f"the pickle asks for {module_name}.{global_name}. The files refs(unc).p, refs(umd).p and refs(google).p "
            "hold plain containers only; this one could run code, and is refused."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise DataError("the pickle refers to an object outside itself, and is refused.")


_MALFORMED = (ValueError, TypeError, AttributeError)  # what unpickling raises on bytes that make no sense


def read_plain_pickle(path: Path) -> Any:
    """The contents of a pickle of plain containers (text of Python 2's pickles read as UTF-8)."""
    with path.open("rb") as file:
        try:
            return PlainUnpickler(file, encoding="utf-8").load()
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        except (pickle.UnpicklingError, EOFError, ArithmeticError, LookupError, *_MALFORMED) as error:
            raise DataError(f"{path} is damaged or only half downloaded: {type(error).__name__}: {error}") from error


def read_refs(refs_path: Path, images: Path) -> list[Row]:
    """Rows of refs(…).p and the instances.json beside it, of which boxes and sizes are held, in the first's order."""
    instances_path = refs_path.parent / "instances.json"
    require([refs_path, instances_path])
    refs = read_plain_pickle(refs_path)
    try:
        wanted = {ref["ann_id"] for ref in refs}
        annotations = read_json_array(instances_path, "annotations.item")
        boxes = {one["id"]: _xyxy(one["bbox"]) for one in annotations if one["id"] in wanted}
        images_of = {
            one["id"]: (one["file_name"], (one["width"], one["height"]))
            for one in read_json_array(instances_path, "images.item")
        }
        lost = [ref["ref_id"] for ref in refs if ref["ann_id"] not in boxes or ref["image_id"] not in images_of]
        if lost:
            raise DataError(
                f"{instances_path} lacks the annotation or image of {len(lost)} of {len(refs)} refs "
                f"(ref_id {some(lost)}): it is incomplete, or belongs to another data set."
            )
        return [
            Row(
                id=f"{ref['split']}-{ref['ref_id']}-{sentence['sent_id']}",
                split=ref["split"],
                image=images / images_of[ref["image_id"]][0],
                expression=sentence["sent"],
                box_xyxy=boxes[ref["ann_id"]],
                size=images_of[ref["image_id"]][1],
            )
            for ref in refs
            for sentence in ref["sentences"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{refs_path} and {instances_path} are not in the form of RefCOCO: {error!r}") from error


def _xyxy(box_xywh: Sequence[float]) -> tuple[float, float, float, float]:
    x, y, width, height = box_xywh
    return x, y, x + width, y + height


def read_vlm_r1(path: Path, images: Path, split: str) -> Iterator[Row]:
    """Rows of a file in VLM-R1's form, in the file's order, with the pixel it adds to x2 and y2 taken off."""
    for number, record in enumerate(read_jsonl(path) if path.suffix == ".jsonl" else read_json_array(path)):
        try:
            if "conversations" in record:
                problem, solution = _turns(record["conversations"])
            else:
                problem, solution = record["problem"], record["solution"]
            x1, y1, x2, y2 = four_numbers(solution)
            image, expression = images / record["image"], expression_of(problem, record.get("normal_caption"))
            size = (record["width"], record["height"]) if "width" in record else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path}: record {number} is not in VLM-R1's form (image, and problem and solution of four numbers, or "
                f"conversations of human and gpt): {error!r}"
            ) from error
        yield Row(f"{split}-{number}", split, image, expression, (x1, y1, x2 - 1, y2 - 1), size)


def _turns(conversation: Any) -> tuple[Any, Any]:
    human, gpt = conversation
    if (human["from"], gpt["from"]) != ("human", "gpt"):
        raise ValueError(f"the conversation is between {human['from']!r} and {gpt['from']!r}")
    return human["value"], gpt["value"]


def four_numbers(solution: Any) -> tuple[float, float, float, float]:
    """The box in a record's solution: a list of four numbers, or a text with four in it.

    >>> four_numbers('{"bbox_2d": [1, 2.5, 30, 40]}')
    (1.0, 2.5, 30.0, 40.0)
    """
    found = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)", solution) if isinstance(solution, str) else solution
    x1, y1, x2, y2 = (float(side) for side in found if not isinstance(side, bool))
    return x1, y1, x2, y2


def expression_of(problem: str, caption: str | None = None) -> str:
    """The referring expression in a VLM-R1 problem, which puts it between "this sentence describes:" and a full stop.

    A problem without these words is the expression itself. `caption` is the record's normal_caption, the expression
    alone: a full stop that it ends in, too, belongs to it.
    """
    *before, text = re.split(r"(?:sentence|phrase) describes\s*:", problem)
    text = re.sub(r"\s*<image>\s*", "", text).strip()
    return text if not before or text == caption else text.removesuffix(".").rstrip()


def read_lmms(source: str, split: str) -> Iterator[Row]:
    """Rows of lmms-lab/RefCOCO*, one for each sentence in a row's `answer`; boxes are xywh in pixels there."""
    for number, row in enumerate(load_hub(source, split)):
        missing = {"image", "bbox", "answer", "question_id"} - set(row)
        if missing:
            raise DataError(f"{source}: the columns {sorted(missing)} are missing; it has {list(row)}.")
        image = (f"{split}-{number:06d}", image_bytes(row["image"]))
        for at, sentence in enumerate(row["answer"]):
            row_id = f"{split}-{row['question_id']}-{number}-{at}"
            yield Row(row_id, split, image, sentence, _xyxy(row["bbox"]))


# ---- checking and writing ----


def write_splits(rows: Iterable[Row], out: Path, limit: int | None = None) -> dict[str, int]:
    """Writes out/{split}.jsonl for every split of `rows`; expressions written per split.

    All rows are checked before any file gets its final name; missing images, unreadable ones, boxes outside their
    image and ids that stand twice are reported together.
    """
    with SplitWriter(out, limit) as writer:
        for row in rows:
            if not writer.take(row.split, row.id):
                continue
            image = writer.image(row.image)
            if image is None:
                continue
            if row.size not in (None, image.size):
                writer.problems.add(
                    "images of another size than the annotations say", f"{image.path} ({image.size}, not {row.size})"
                )
            box = box_within(row.box_xyxy, image.size, EDGE_TOLERANCE)
            if box is None:
                writer.problems.add(
                    "boxes that are empty or leave their image", f"{row.id}: {list(row.box_xyxy)} in {image.size}"
                )
                continue
            line = {
                "id": row.id,
                "image": image.path,
                "expression": row.expression,
                "bbox_xyxy": box,
                "width": image.size[0],
                "height": image.size[1],
            }
            writer.write(row.split, line)
    return writer.counts


# ---- the command ----

OPTIONS = ("out", "annotations", "images", "split", "limit", "dataset")


def dataset_of(annotations: str) -> str | None:
    """The data set that a path or repository names, if it does."""
    named = re.findall(r"refcoco(\+|plus|p(?=_)|g)?", annotations.lower())
    if not named:
        return None
    return {"": "refcoco", "g": "refcocog"}.get(named[-1], "refcoco+")


def report(counts: Mapping[str, int], dataset: str | None, limit: int | None, every: bool = True) -> list[str]:
    """One line per split: what was written, beside the official count; with `every`, also the splits not written."""
    return writing.report(counts, OFFICIAL.get(dataset or "", {}), limit, "expressions", every)


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, annotations = required(options, "out", "annotations")
    split, limit = options.get("split", ""), whole_number(options, "limit")
    dataset = options.get("dataset") or dataset_of(annotations)
    if dataset is not None and dataset not in OFFICIAL:
        raise DataError(f"dataset is {dataset!r}; accepted: {', '.join(OFFICIAL)}")
    path, notes = Path(annotations), []
    if "google" in path.name:
        dataset = None  # another partition than the one that is counted
    if path.suffix in (".p", ".pkl", ".pickle"):
        rows: Iterable[Row] = read_refs(path, _images_folder(options))
        known_split(options, dict.fromkeys(row.split for row in rows))
        rows = [row for row in rows if split in ("", row.split)]
    elif not split:
        raise DataError("split=… is missing: these annotations do not say which split they are.")
    elif path.suffix in (".json", ".jsonl"):
        rows = itertools.islice(read_vlm_r1(path, _images_folder(options), split), limit)
    else:
        rows = itertools.islice(read_lmms(annotations, split), limit)
        notes = lmms_notes(dataset, [split])
    return [*report(write_splits(rows, Path(out), limit), dataset, limit, every=not split), *notes]


def _images_folder(options: Mapping[str, str]) -> Path:
    folder = Path(options.get("images", ""))
    if not options.get("images") or not folder.is_dir():
        raise DataError(f"images is {options.get('images', '')!r}; give the folder of the images as images=DIR.")
    return folder


def main(arguments: Sequence[str]) -> int:
    return run_script(__doc__, OPTIONS, convert, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
