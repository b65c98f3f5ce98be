"""What the data scripts of visual question answering share: a question with its answers, as one line.

A line is {"id", "image", "question", "answers", "question_id", "groups"}: the image's path from the folder, all
reference answers (none where they are not public), the question's id as the official files have it, and the groups
that are also reported on their own, such as "answer_type/number"."""

import ast
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_scripts.writing import (
    HUB_SPLITS,
    DataError,
    SplitWriter,
    image_bytes,
    image_source,
    known_split,
    load_hub,
    read_json_array,
    read_tsv,
    report,
    required,
    some,
    whole_number,
)
from tasks._hub_rows import Asked, of_vqa

Image = Path | tuple[str, bytes]


@dataclass(frozen=True)
class Question:
    """One question about one image, which is fetched only if the question is wanted."""

    split: str
    id: str
    image: Callable[[], Image]
    question: str
    answers: Sequence[str]
    question_id: int | str
    groups: Sequence[str] = ()
    where: str = ""  # the file and the place in it


def question_of(split: str, asked: Asked, image: Callable[[], Image]) -> Question:
    """The question of a row, under its own number or text."""
    key = asked.question_id
    return Question(split, str(key), image, asked.question, asked.answers, key, asked.groups)


def convert(
    options: Mapping[str, str],
    read: Callable[[Mapping[str, str]], Iterator[Question]],
    official: Mapping[str, int],
    unanswered: Collection[str] = (),
    splits: Collection[str] = (),
) -> list[str]:
    """Writes the questions that `read` gives, all of one split; the lines to print. `unanswered`: see below.

    `splits` are those that there are, where they are not those of the official counts.
    """
    known_split(options, splits or official)
    out, limit = Path(required(options, "out")[0]), whole_number(options, "limit")
    questions = read(options)
    return report(
        write_questions(islice(questions, limit), out, limit, unanswered),
        official,
        limit,
        "questions",
        every=False,
    )


def write_questions(
    questions: Iterable[Question], out: Path, limit: int | None = None, unanswered: Collection[str] = ()
) -> dict[str, int]:
    """Writes out/{split}.jsonl for every split of the questions; questions written per split.

    `unanswered` are the splits whose answers are not public: a question of any other split has an answer.
    """
    with SplitWriter(out, limit) as writer:
        for question in questions:
            if not writer.take(question.split, question.id):
                continue
            texts = [question.question, *question.answers]
            if not all(isinstance(text, str) for text in texts):
                writer.problems.add("questions that are no text, or have an answer that is none", question.id)
            elif question.split not in unanswered and not any(text.strip() for text in question.answers):
                writer.problems.add(
                    f"questions of {question.split} without an answer", f"{question.id} ({question.where})"
                )
            image = writer.image(question.image())
            if image is not None:
                row = {
                    "id": question.id,
                    "image": image.path,
                    "question": question.question,
                    "answers": list(question.answers),
                    "question_id": question.question_id,
                    "groups": list(question.groups),
                }
                writer.write(question.split, row)
    return writer.counts


def each(
    records: Iterable[Any], make: Callable[[int, Any], Question | None], where: object, form: str
) -> Iterator[Question]:
    """The questions that `make(number, record)` reads from the records, without those it leaves out by None.

    Raises: DataError that says `where`, which record and the `form` it should have.
    """
    for number, record in enumerate(records):
        try:
            question = make(number, record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(f"{where}: record {number} is not in the form of {form}: {error!r}") from error
        if question is not None:
            yield replace(question, where=f"{where}: record {number}")


def hub_questions(
    source: str,
    split: str,
    of_hub: Callable[[int, Any], Asked],
    config: str | None = None,
    hub_split: str | None = None,
) -> Iterator[Question]:
    """The questions of a data set's rows on the hub or in its files, see `load_hub`.

    `of_hub(number, row)` reads one row; its image is named by its content, for many rows may ask about one image.
    `hub_split` is the split's name on the hub, where HUB_SPLITS does not say it.
    """
    rows = load_hub(source, hub_split or HUB_SPLITS.get(split, split), config)

    def image_of(row: Any) -> tuple[str, bytes]:
        encoded = image_bytes(row["image"])
        return f"{split}-{hashlib.sha256(encoded).hexdigest()[:16]}", encoded

    def make(number: int, row: Any) -> Question:
        return question_of(split, of_hub(number, row), lambda: image_of(row))

    return each(rows, make, source, "the data set's rows")


def tsv_questions(path: Path, split: str) -> Iterator[Question]:
    """The questions of a TSV of VLMEvalKit: index, image, question, answer (a text or a Python list of them), split."""

    def make(number: int, row: Any) -> Question:
        image = row["image"]
        if len(image) != 1:
            raise ValueError(f"{len(image)} images, where there is one per question")
        groups = [row["split"]] if row.get("split") else []
        answers = texts_of(row["answer"]) if row.get("answer") else []
        name = f"{split}-{row['index']}"
        return Question(split, row["index"], lambda: (name, image[0]), row["question"], answers, row["index"], groups)

    return each(read_tsv(path), make, path, "VLMEvalKit's tables")


def texts_of(field: str) -> list[str]:
    """The texts in a field that holds one text, or several as a Python or JSON list.

    >>> texts_of("red"), texts_of("['a', 'b']"), texts_of("[1, 2]")
    (['red'], ['a', 'b'], ['[1, 2]'])
    """
    try:
        several = ast.literal_eval(field) if field.startswith("[") else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        several = None
    if isinstance(several, list) and several and all(isinstance(text, str) for text in several):
        return several
    return [field]


# ---- the files of the VQA challenges: VQAv2 and OK-VQA ----


def read_vqa(options: Mapping[str, str], subtypes: Mapping[str, str], test_splits: Sequence[str]) -> Iterator[Question]:
    """The questions of a split, joined with their annotations; `subtypes` maps splits to names such as "val2014"."""
    questions, split, images = required(options, "questions", "split", "images")
    subtype = subtypes[split]
    records: Iterable[Any] = read_json_array(Path(questions), "questions.item", f"*_{subtype}_questions.json")
    annotations = options.get("annotations")
    if annotations:
        records = join(
            records,
            read_json_array(Path(annotations), "annotations.item", f"*_{subtype}_annotations.json"),
            annotations,
        )
    elif split in test_splits:
        records = ((question, {}) for question in records)
    else:
        raise DataError(f"annotations=… is missing: only {', '.join(test_splits) or 'no split'} has questions alone.")
    fetch = image_source(Path(images))
    folder = "test2015" if subtype == "test-dev2015" else subtype

    def make(number: int, pair: Any) -> Question:
        question, annotation = pair
        name = f"COCO_{folder}_{question['image_id']:012d}.jpg"
        return question_of(split, of_vqa(question, annotation), lambda: fetch(name))

    return each(records, make, questions, "the VQA challenge")


def _question_id(record: Any, where: str) -> int | str:
    found = record.get("question_id") if isinstance(record, dict) else None
    if not isinstance(found, int | str):
        raise DataError(
            f"{where}: {record!r:.200} is not in the form of the VQA challenge: its question_id is missing."
        )
    return found


def join(questions: Iterable[Any], annotations: Iterable[Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Pairs of the same question_id. Memory holds what stands apart in the two files: nothing, in the official ones.

    Raises: DataError where a question has no annotation or the other way round.
    """
    early: dict[Any, Any] = {}
    waiting: dict[Any, Any] = {}
    others = iter(annotations)
    for question in questions:
        key = _question_id(question, "the questions")
        other = next(others, None)
        if other is not None:
            early[_question_id(other, where)] = other
        if key in early:
            yield question, early.pop(key)
        else:
            waiting[key] = question
        if other is not None and other["question_id"] in waiting:
            yield waiting.pop(other["question_id"]), early.pop(other["question_id"])
    for other in others:
        question = waiting.pop(_question_id(other, where), None)
        if question is None:
            early[other["question_id"]] = other
        else:
            yield question, other
    if waiting or early:
        raise DataError(
            f"{where} does not belong to the questions: {len(waiting)} questions have no annotation "
            f"({some(list(waiting)) or 'none'}), {len(early)} annotations no question ({some(list(early)) or 'none'})."
        )
