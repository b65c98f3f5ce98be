"""GSM8K from its published forms to one JSONL per split.

    python -m data_scripts.gsm8k out=DIR data=grade_school_math/data/train.jsonl split=train
    python -m data_scripts.gsm8k out=DIR data=grade_school_math/data
    python -m data_scripts.gsm8k out=DIR data=openai/gsm8k split=test

`data` is a .jsonl or .parquet file, a folder with train.jsonl and test.jsonl, a folder of parquet shards or of
`save_to_disk`, or the name on the hub. Rows are {"question", "answer"}, the answer a worked solution that ends in
"#### NUMBER". Each line of DIR/{split}.jsonl is {"id", "question", "answer"} with the answer as published. `limit=N`
stops after N rows of a split.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_scripts.writing import (
    SplitWriter,
    known_split,
    load_hub,
    read_jsonl,
    report,
    required,
    run_script,
    whole_number,
)

OFFICIAL = {"train": 7473, "test": 1319}
SPLITS = (*OFFICIAL, "val")  # the last for a file of your own
OPTIONS = ("out", "data", "split", "limit")
_FINAL = re.compile(r"####\s*-?[$]?[\d,]*\.?\d+\s*\Z")


def read(source: str, split: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Split and row, in the source's order."""
    folder = Path(source)
    official = [folder / f"{name}.jsonl" for name in OFFICIAL if split in (None, name)]
    if folder.is_dir() and any(path.is_file() for path in official):
        for path in official:
            yield from ((path.stem, row) for row in read_jsonl(path))
        return
    name = split or next((name for name in OFFICIAL if folder.stem.startswith(name)), "train")
    yield from ((name, row) for row in load_hub(source, name, "main"))


def convert(options: Mapping[str, str]) -> list[str]:
    """Reads, checks and writes as the options say; the lines to print."""
    out, source = required(options, "out", "data")
    numbers: dict[str, int] = {}
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for split, row in read(source, known_split(options, SPLITS)):
            number = numbers[split] = numbers.get(split, -1) + 1
            row_id = f"{split}-{number}"
            if not writer.take(split, row_id):
                continue
            question, answer = row.get("question"), row.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str) or not _FINAL.search(answer):
                writer.problems.add("rows without a question, or a solution that ends in #### and a number", row_id)
                continue
            writer.write(split, {"id": row_id, "question": question, "answer": answer})
    return report(writer.counts, OFFICIAL, writer.limit, "problems", every=False)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
