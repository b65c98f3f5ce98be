"""Generated scenes to JSONL: coloured shapes, an expression that refers to one of them, and its exact box.

    python -m data_scripts.tiny_scenes out=DIR [split=val] [count=200] [seed=0]

writes DIR/{split}.jsonl, one {"id", "image", "expression", "bbox_xyxy", "width", "height"} a line, and the PNGs. Scenes
are those of tasks/_generated/scenes.py.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from data_scripts.writing import DataError, required, run_script, whole_number
from tasks._generated.scenes import SPLITS, make_scene


def write_split(folder: Path, split: str, count: int, seed: int = 0) -> Path:
    """DIR/{split}.jsonl and its images; the file appears only when it is complete."""
    images = folder / split
    images.mkdir(parents=True, exist_ok=True)
    target = folder / f"{split}.jsonl"
    unfinished = target.with_suffix(".jsonl.part")
    with unfinished.open("w", encoding="utf-8") as lines:
        for index in range(count):
            scene = make_scene(split, index, seed)
            scene.image.save(images / f"{scene.id}.png")
            row = {
                "id": scene.id,
                "image": f"{split}/{scene.id}.png",
                "expression": scene.expression,
                "bbox_xyxy": list(scene.box_xyxy),
                "width": scene.image.width,
                "height": scene.image.height,
            }
            lines.write(json.dumps(row) + "\n")
    unfinished.replace(target)
    return target


def convert(options: Mapping[str, str]) -> list[str]:
    """Writes as the options say; the lines to print."""
    [out] = required(options, "out")
    split = options.get("split", "val")
    if split not in SPLITS:
        raise DataError(f"split is {split!r}; accepted: {', '.join(SPLITS)}")
    count, seed = whole_number(options, "count") or 200, whole_number(options, "seed", fewest=0) or 0
    return [str(write_split(Path(out), split, count, seed))]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, ("out", "split", "count", "seed"), convert, sys.argv[1:]))
