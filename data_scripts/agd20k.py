"""AGD20K's test images with their heat maps, from its folders, to one JSONL per setting.

    python -m data_scripts.agd20k out=DIR root=AGD20K

`root` is the folder of the data set, with Seen/testset and Unseen/testset in it; each holds
egocentric/ACTION/OBJECT/NAME.jpg and the heat maps GT/ACTION/OBJECT/NAME.png. `split` (seen or unseen) restricts to one
of them, `limit=N` stops after N of each. Egocentric images without a heat map are counted and left out, as the data
set's own evaluation leaves them out; a heat map without its image is reported.

Each line of DIR/{seen,unseen}.jsonl is {"id", "image", "heat_map", "action", "object", "width", "height"}, paths from
DIR; action and object in words ("cut with", "golf clubs").
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_scripts.writing import DataError, SplitWriter, known_split, report, required, run_script, whole_number

OFFICIAL = {"seen": 1675, "unseen": 540}  # images with a heat map, as papers on the data set count (arXiv 2311.17776)
SETTINGS = {"seen": "Seen", "unseen": "Unseen"}
OPTIONS = ("out", "root", "split", "limit")
SUFFIXES = (".jpg", ".jpeg", ".png")


def convert(options: Mapping[str, str]) -> list[str]:
    """Does what the command line asks for; the lines to print."""
    out, root = required(options, "out", "root")
    only = known_split(options, SETTINGS)
    chosen = [only] if only else list(SETTINGS)
    notes = []
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for split in chosen:
            testset = Path(root) / SETTINGS[split] / "testset"
            _write_split(writer, split, testset)
            without = sum(1 for _ in _images(testset / "egocentric")) - sum(1 for _ in _heat_maps(testset))
            if without:
                notes.append(f"{split}: {without:,} egocentric images have no heat map and were left out")
    return [*report(writer.counts, OFFICIAL, writer.limit, "images", every=only is None), *notes]


def _write_split(writer: SplitWriter, split: str, testset: Path) -> None:
    if not (testset / "GT").is_dir():
        raise DataError(
            f"{testset / 'GT'} is no folder; root must be the folder of AGD20K, with Seen and Unseen in it."
        )
    for path in _heat_maps(testset):
        action, thing = path.parts[-3:-1]
        row_id = f"{action}/{thing}/{path.stem}"
        if not writer.take(split, row_id):
            return
        found = [testset / "egocentric" / action / thing / f"{path.stem}{suffix}" for suffix in SUFFIXES]
        image = writer.image(next((one for one in found if one.is_file()), found[0]))
        heat_map = writer.image(path)
        if image is None or heat_map is None:
            continue
        row = {"id": row_id, "image": image.path, "heat_map": heat_map.path, "action": _words(action)}
        writer.write(split, row | {"object": _words(thing), "width": image.size[0], "height": image.size[1]})


def _heat_maps(testset: Path) -> Iterator[Path]:
    return _images(testset / "GT")


def _images(folder: Path) -> Iterator[Path]:
    """Files ACTION/OBJECT/NAME of a folder, in the order of their names."""
    yield from (path for path in sorted(folder.glob("*/*/*")) if path.suffix.lower() in SUFFIXES)


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
