"""Answers of an evaluation as files: those that are to be scored, those that were given, those of an unfinished one.

A file of predictions has one JSON object per line, with "id" and "answer" (in original-image coordinates). Of several
answers to one sample, each has its "thought_index" and "answer_index" (0 where they are left out). Other keys are
ignored, so that the predictions.jsonl of an evaluation is such a file. Of an answer that is a model's whole text, with
tags of a thought or an answer, the part inside the answer tags counts; the answers of an evaluation's file stay as they
are.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlm_grpo.common.atomic import write_whole
from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring.answers import extract_answer

PARTIAL = "partial"  # the folder of an unfinished evaluation's answers, in its output folder
MADE_FROM = "made_from.json"  # what the answers of a finished one depend on


SCORES = ("reward", "parts")  # what a prediction gets when it is scored


@dataclass(frozen=True)
class Prediction:
    """One answer of an evaluation. `answer` is in original-image coordinates, `model_answer` as the model wrote it.

    Where a sample has several answers, they are told apart by the places (from 0) of the thought and of the answer.
    """

    id: str
    answer: str
    reward: float | None = None  # None: not scored yet, or the task has no reward for this answer
    parts: Mapping[str, float] = field(default_factory=dict)
    model_answer: str = ""
    thought: str = ""
    thought_index: int = 0
    answer_index: int = 0


Place = tuple[str, int, int]  # of an answer: sample id, thought, answer of the thought


def read_predictions(path: Path, known: Iterable[str]) -> dict[Place, str]:
    """Answers by their places.

    Raises: UserError, naming file and line, for lines that are no prediction, ids twice and ids that are not `known`.
    """
    answers: dict[Place, str] = {}
    ids = set(known)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"predictions={path}: it cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"predictions={path}, line {number}"
        try:
            row = json.loads(line)
            key, answer = row["id"], row["answer"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f'{where}: not of the form {{"id": …, "answer": …}}') from error
        if type(key) is int:  # as in the files of many benchmarks; ours are text
            key = str(key)
        if not isinstance(answer, str):
            raise UserError(f"{where}: the answer of id {key!r} is {answer!r}, not text")
        if not isinstance(key, str) or key not in ids:
            raise UserError(f"{where}: the id {key!r} is of none of the {len(ids)} samples (split, max_samples)")
        indices = row.get("thought_index", 0), row.get("answer_index", 0)
        if not all(type(index) is int and index >= 0 for index in indices):
            raise UserError(f"{where}: thought_index and answer_index are {indices}; they must be whole numbers from 0")
        place: Place = (key, *indices)
        if place in answers:
            several = "; several answers to a sample need a thought_index or answer_index of their own"
            raise UserError(f"{where}: the id {key!r} is twice in the file{several}")
        answers[place] = extract_answer(answer) if "model_answer" not in row and _is_whole_text(answer) else answer
    if not answers:
        raise UserError(f'predictions={path}: it holds no line {{"id": …, "answer": …}}')
    return answers


def _is_whole_text(answer: str) -> bool:
    """Whether the answer is all that a model wrote: where its prompt ended with a tag, the text begins after that."""
    return answer.lstrip().startswith("<think>") or any(tag in answer for tag in ("</think>", "<answer>", "</answer>"))


def predictions_digest(path: Path) -> str:
    """A digest of a file's content."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"predictions={path}: it cannot be read: {error}") from error


def predictions_file(predictions: Path, job: str, alone: bool) -> Path:
    """The file with the answers of a job (TASK-SPLIT): `predictions` itself, or the one in that folder for this job.

    Raises: UserError where the folder has none, or where one file is given for several jobs.
    """
    if not predictions.is_dir():
        if alone:
            return predictions
        if not predictions.exists():
            raise UserError(f"predictions={predictions}: there is no such folder")
        raise UserError(
            f"predictions={predictions}: for several tasks or splits, name a folder with a file for each of them, "
            f"such as {job}.jsonl"
        )
    candidates = [predictions / f"{job}.jsonl", predictions / job / "predictions.jsonl"]
    found = [path for path in candidates if path.is_file()]
    if not found:
        there = ", ".join(sorted(path.name for path in predictions.iterdir())[:20]) or "nothing"
        wanted = " nor ".join(str(path.relative_to(predictions)) for path in candidates)
        raise UserError(f"predictions={predictions}: the folder has neither {wanted}; it has {there}")
    return found[0]


def predictions_bytes(predictions: Sequence[Prediction]) -> bytes:
    """One line of JSON for each."""
    return "".join(json.dumps(asdict(p), ensure_ascii=True) + "\n" for p in predictions).encode()


class Journal:
    """Where one process notes what it has answered, so that a kill costs no more than a batch of answers.

    FOLDER/partial/options.json   what the answers depend on
    FOLDER/partial/rank-N.jsonl   one line per batch, with its predictions; a kill leaves at most one line unfinished

    Rewards are not noted: what goes on may have another reward, and all answers are scored by that one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / PARTIAL / f"rank-{rank}.jsonl"

    def append(self, predictions: Sequence[Prediction]) -> None:
        """Write the predictions of a batch, and return when they are on the disk."""
        rows = [{name: value for name, value in asdict(p).items() if name not in SCORES} for p in predictions]
        line = json.dumps(rows) + "\n"
        try:
            with open(self.path, "ab") as file:
                if file.tell() and not _ends_a_line(self.path):
                    line = "\n" + line
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error} (output_dir)") from error


def check_finished(folder: Path, facts: Mapping[str, Any]) -> None:
    """Raise UserError if the folder has the results of an evaluation whose answers depend on other `facts`."""
    path = folder / MADE_FROM
    if not path.is_file():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"output_dir={folder}: {path.name} there cannot be read: {error}") from error
    found = f"output_dir={folder}: the results there are of an evaluation"
    _check_same(saved, facts, found, ", and would be replaced: set another output_dir, or delete that folder")


def _check_same(saved: Mapping[str, Any], facts: Mapping[str, Any], found: str, advice: str) -> None:
    """Raise UserError, from what was `found` to the `advice`, if facts differ from those that were saved."""
    now = json.loads(json.dumps(facts))
    differ = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
    if differ:
        said = "; ".join(f"{name} was {saved.get(name)!r}, is now {now.get(name)!r}" for name in differ)
        raise UserError(f"{found} with other settings or data ({said}){advice}")


def take_up(folder: Path, facts: Mapping[str, Any], free: Collection[str] = ()) -> list[Prediction]:
    """The answers, not scored, that an unfinished evaluation left in the folder; `facts` are what they depend on.

    For one process, before any journal of the folder is written to. Raises: UserError if the facts there are others,
    but for those that are `free` to differ.
    """
    place = folder / PARTIAL
    options = place / "options.json"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not options.is_file():
            for path in place.glob("rank-*.jsonl"):  # of one whose end was killed while it tidied up
                path.unlink()
            write_whole(options, json.dumps(facts, indent=1).encode())
            return []
        saved = json.loads(options.read_text(encoding="utf-8"))
        lines = [line for path in sorted(place.glob("rank-*.jsonl")) for line in path.read_bytes().split(b"\n")]
    except (OSError, ValueError) as error:
        raise UserError(f"output_dir={folder}: it cannot be written or read: {error}") from error
    unfinished = f"{place} holds the answers of an unfinished evaluation"
    compared, now = ({k: v for k, v in each.items() if k not in free} for each in (saved, facts))
    _check_same(compared, now, unfinished, ": finish it with those, delete that folder, or set another output_dir")
    if saved != json.loads(json.dumps(facts)):
        write_whole(options, json.dumps(facts, indent=1).encode())
    found: dict[tuple[str, int, int], Prediction] = {}
    for line in lines:
        for prediction in _batch(line):
            found[prediction.id, prediction.thought_index, prediction.answer_index] = prediction
    return list(found.values())


def finish(folder: Path) -> None:
    """Forget what `take_up` would find."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def _batch(line: bytes) -> list[Prediction]:
    """The predictions of a line, none if a kill cut it off."""
    try:
        return [Prediction(**row) for row in json.loads(line)]
    except (ValueError, TypeError):
        return []


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
