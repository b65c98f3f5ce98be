"""MBPP and HumanEval from their published forms to one JSONL per split of exercises with tests.

    python -m data_scripts.code out=DIR data=mbpp.jsonl
    python -m data_scripts.code out=DIR data=sanitized-mbpp.json
    python -m data_scripts.code out=DIR data=HumanEval.jsonl.gz
    python -m data_scripts.code out=DIR data=google-research-datasets/mbpp config=full split=train

`data` is a file (.jsonl, .jsonl.gz, .json, .parquet), a folder of `save_to_disk` or of parquet shards, or a name on
the hub; `config` is the configuration there, or in a cloned repository. A row has MBPP's keys (task_id, text or prompt,
code, test_list, test_setup_code or test_imports), HumanEval's (task_id, prompt, canonical_solution, test, entry_point),
or id, question, tests (a list of programs or one program) and, where they are known, setup, entry_point and reference.

Each line of DIR/{split}.jsonl is {"id", "question", "tests", "setup", "entry_point", "reference"}. Files without splits
are divided as their authors do: mbpp.jsonl by task_id into prompt (1-10), test (11-510), val (511-600) and train
(601-974); anything else is written as `split` (test if none is given). Every program is parsed; nothing is run.
`limit=N` stops after N rows of a split.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_scripts.writing import (
    OUR_SPLITS,
    DataError,
    SplitWriter,
    load_hub,
    read_json_array,
    read_jsonl,
    read_parquet,
    report,
    required,
    run_script,
    whole_number,
)
from tasks._hub_rows import row_of

MBPP = {"train": 374, "val": 90, "test": 500, "prompt": 10}
SANITIZED = {"train": 120, "val": 43, "test": 257, "prompt": 7}
HUMANEVAL = {"test": 164}
OPTIONS = ("out", "data", "split", "config", "limit")


def read_records(source: str, split: str | None, config: str | None) -> Iterator[dict[str, Any]]:
    """The rows of a file, or of a split in a folder or on the hub."""
    path = Path(source)
    if path.is_file():
        readers = {".jsonl": read_jsonl, ".gz": read_jsonl, ".json": read_json_array, ".parquet": read_parquet}
        if path.suffix not in readers:
            raise DataError(f"data is {source!r}; accepted: {', '.join(readers)}, a folder, or a name on the hub")
        return readers[path.suffix](path)
    if split is None:
        raise DataError("split=… is missing: which split of the folder or of the hub's data set?")
    return load_hub(source, split, config)


def _own_split(record: Mapping[str, Any]) -> str:
    """The split of a row of a file: MBPP's, which its numbers say, or test."""
    if "test_list" not in record:
        return "test"
    task = int(record["task_id"])
    return "prompt" if task <= 10 else "test" if task <= 510 else "val" if task <= 600 else "train"


def convert(options: Mapping[str, str]) -> list[str]:
    """Reads, checks and writes as the options say; the lines to print."""
    out, source = required(options, "out", "data")
    official: dict[str, int] = {}
    with SplitWriter(Path(out), whole_number(options, "limit")) as writer:
        for number, record in enumerate(read_records(source, options.get("split"), options.get("config")), 1):
            try:
                row, split = row_of(record), options.get("split") or _own_split(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{source}, row {number}: not MBPP's, HumanEval's or our own form: {error!r}"
                ) from error
            official = official or _official(record)
            split = OUR_SPLITS.get(split, split)
            if not writer.take(split, row["id"]):
                continue
            if not row["tests"] or not isinstance(row["tests"], str | list):
                writer.problems.add("exercises without a test", f"{row['id']} of {source}")
                continue
            for what in ("setup", "reference", "tests"):
                for program in row[what] if isinstance(row[what], list) else [row[what]]:
                    _check(writer, f"{row['id']}: {what}", program)
            writer.write(split, row)
    return report(writer.counts, official, writer.limit, "exercises", every=False)


def _official(record: Mapping[str, Any]) -> dict[str, int]:
    if "canonical_solution" in record:
        return HUMANEVAL
    return {} if "test_list" not in record else MBPP if "text" in record else SANITIZED


def _check(writer: SplitWriter, what: str, program: str) -> None:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, TypeError) as error:
        writer.problems.add("programs that are no Python", f"{what} ({error})")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
