"""LISA-Grounding, VLM-R1's out-of-domain test (omlab/VLM-R1 on the hub), to one JSONL.

    python -m data_scripts.lisa_grounding out=DIR annotations=lisa_test.json images=lisa_test.zip

`annotations` is the JSON array lisa_test.json of rec_jsons_processed.zip (or that archive itself): records of `image`,
`problem` and `solution` (xyxy in pixels), with `height` and `width` checked where they stand, and other keys left out.
The problem is the sentence, with or without VLM-R1's words around it; `normal_caption` is used where there is no
problem. `images` is lisa_test.zip (lisa-test.zip in VLM-R1's README) or its unpacked folder. `split` (test) names the
file, `limit=N` stops after N.

Each line of DIR/{split}.jsonl is {"id", "image", "expression", "bbox_xyxy", "width", "height"}: the image's path from
DIR, the box in pixels of that image as the file has it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_scripts.refcoco import expression_of, four_numbers
from data_scripts.shapes import box_within
from data_scripts.writing import (
    DataError,
    SplitWriter,
    image_source,
    read_json_array,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"test": 1658}  # records of lisa_test.json; they are of the 779 images of ReasonSeg's test split
OPTIONS = ("out", "annotations", "images", "split", "limit")
EDGE_TOLERANCE = 1.0  # pixels by which a box may leave its image, since some tools count the last pixel's far side


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, annotations, images = required(options, "out", "annotations", "images")
    split, read_image = options.get("split", "test"), image_source(Path(images))
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for number, record in enumerate(read_json_array(Path(annotations), member="lisa_test.json")):
            where = f"{annotations}: record {number}"
            row_id = f"{split}-{number}"
            if not writer.take(split, row_id):
                break
            name, expression, box, claimed = _read(record, where)
            image = writer.image(read_image(name))
            if image is None:
                continue
            if claimed not in (None, image.size):
                writer.problems.add("images of another size than the annotations say", f"{name} ({image.size})")
            cut = box_within(box, image.size, EDGE_TOLERANCE)
            if cut is None:
                writer.problems.add("boxes that are empty or leave their image", f"{where}: {box} in {image.size}")
                continue
            row = {"id": row_id, "image": image.path, "expression": expression, "bbox_xyxy": cut}
            writer.write(split, row | {"width": image.size[0], "height": image.size[1]})
    return report(writer.counts, OFFICIAL, writer.limit, "sentences", every=False)


def _read(record: Any, where: str) -> tuple[str, str, list[float], tuple[int, int] | None]:
    """Name of the image, sentence, box and the size that is claimed for the image, if one is."""
    try:
        problem = record["problem"] if record.get("problem") else record["normal_caption"]
        box = list(four_numbers(record["solution"]))
        claimed = (int(record["width"]), int(record["height"])) if "width" in record else None
        return str(record["image"]), expression_of(problem, record.get("normal_caption")), box, claimed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where} is not in VLM-R1's form (image, problem, solution of four numbers): {error!r}"
        ) from error


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
