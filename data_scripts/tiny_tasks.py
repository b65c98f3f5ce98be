"""Generated data for tasks that read files: pictures with questions for `jsonl`, one-line functions for `code`.

    python -m data_scripts.tiny_tasks out=DIR [seed=0]

writes DIR/names/{train,val}.jsonl, pictures of coloured shapes whose colours and places are to be named from left to
right, {"id", "image", "question", "answer"} a line, and DIR/code/{warm,train,val}.jsonl, functions of x that no two
splits share, in the form of `data_scripts.code`. `names_train=N`, `code_val=N` and so on change the sizes.
"""

import io
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from data_scripts.writing import DataError, SplitWriter, required, run_script, whole_number
from tasks._generated.scenes import describe, make_scene

NAMES = {"train": 640, "val": 256}
CODE = {"warm": 300, "train": 600, "val": 256}
OPTIONS = ("out", "seed", *(f"names_{split}" for split in NAMES), *(f"code_{split}" for split in CODE))
NAMES_QUESTION = "Name all from left to right."
MOST = 29  # the largest constant of a function
FORMS: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "{a} times x plus {b}": ("{a} * x + {b}", lambda x, a, b: a * x + b),
    "{a} times x minus {b}": ("{a} * x - {b}", lambda x, a, b: a * x - b),
    "x plus {a}, times {b}": ("(x + {a}) * {b}", lambda x, a, b: (x + a) * b),
}


def write_names(out: Path, sizes: Mapping[str, int], seed: int) -> dict[str, int]:
    """The pictures and their questions; how many of each split."""
    with SplitWriter(out) as writer:
        for split, size in sizes.items():
            for index in range(size):
                scene = make_scene(split, index, seed)
                file = io.BytesIO()
                scene.image.save(file, "png")
                writer.take(split, scene.id)
                image = writer.image((scene.id, file.getvalue()))
                ordered = sorted(scene.shapes, key=lambda shape: shape.box_xyxy[0])
                answer = "; ".join(describe(shape, scene.image.size) for shape in ordered)
                if image:
                    row = {"id": scene.id, "image": image.path, "question": NAMES_QUESTION, "answer": answer}
                    writer.write(split, row)
    return writer.counts


def write_code(out: Path, sizes: Mapping[str, int], seed: int) -> dict[str, int]:
    """The functions; how many of each split."""
    every = [(words, a, b) for words in FORMS for a in range(2, MOST + 1) for b in range(2, MOST + 1)]
    if sum(sizes.values()) > len(every):
        names = " + ".join(f"code_{split}={size}" for split, size in sizes.items())
        raise DataError(f"{names} are more than there are functions: {len(every):,}, of which no two splits share one.")
    random.Random(seed).shuffle(every)
    rest = iter(every)
    with SplitWriter(out) as writer:
        for split, size in sizes.items():
            for words, a, b in [next(rest) for _ in range(size)]:
                form, value = FORMS[words]
                code = form.format(a=a, b=b)
                row = {
                    "id": f"{split}-{code.replace(' ', '')}",
                    "question": f"Write f(x): {words.format(a=a, b=b)}.",
                    "tests": [f"assert f({x}) == {value(x, a, b)}" for x in (0, 1, 2, 5)],
                    "reference": f"def f(x): return {code}",
                }
                writer.take(split, row["id"])
                writer.write(split, row)
    return writer.counts


def convert(options: Mapping[str, str]) -> list[str]:
    """Writes as the options say; the lines to print."""
    [out] = required(options, "out")
    seed = whole_number(options, "seed", fewest=0) or 0
    lines = []
    for name, sizes, write in (("names", NAMES, write_names), ("code", CODE, write_code)):
        wanted = {split: whole_number(options, f"{name}_{split}") or size for split, size in sizes.items()}
        counts = write(Path(out) / name, wanted, seed)
        lines += [f"{name}, {split}: {count:,}" for split, count in counts.items()]
    return lines


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
