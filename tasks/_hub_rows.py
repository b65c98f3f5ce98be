"""Readers for rows of data sets on the Hugging Face hub, shared by the tasks and the data scripts.

This module imports nothing of the package, so that a data script can run without it.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# ---- visual question answering ----


@dataclass(frozen=True)
class Asked:
    """A question about an image, with all that its row holds except the image."""

    question: str
    answers: Sequence[str]
    question_id: int | str
    groups: Sequence[str] = ()


def known(answers: Iterable[Any]) -> list[str]:
    """The answers as texts: numbers are converted and nulls are dropped.

    >>> known([12.5, None, "a"])
    ['12.5', 'a']
    """
    return [str(answer) for answer in answers if answer is not None]


CHART_KINDS = ("human", "augmented")


def of_chartqa(split: str, number: int, row: Any) -> Asked:
    """A row of lmms-lab/ChartQA (question, answer, type) or HuggingFaceM4/ChartQA (query, label, human_or_machine)."""
    if "query" in row:
        kind, question, answers = CHART_KINDS[row["human_or_machine"]], row["query"], known(row["label"])
    else:
        kind, question, answers = row["type"].split("_")[0], row["question"], known([row["answer"]])
    if kind not in CHART_KINDS:
        raise ValueError(f"the type {kind!r} is none of {', '.join(CHART_KINDS)}")
    return Asked(question, answers, f"{split}-{number}", [kind])


def of_docvqa(row: Any) -> Asked:
    """A record of DocVQA's official file, or a row of lmms-lab/DocVQA, where the question's id is text."""
    groups = [f"question_type/{kind}" for kind in row.get("question_types") or []]
    return Asked(row["question"], row.get("answers") or [], int(row["questionId"]), groups)


def of_textvqa(row: Any) -> Asked:
    """A record of TextVQA's official file, or a row of lmms-lab/textvqa, which has the same fields."""
    return Asked(row["question"], [answer for answer in row.get("answers") or [] if answer], row["question_id"])


def of_vqa(question: Any, annotation: Any) -> Asked:
    """A question of the VQA challenge and its annotation, which may be empty; a row of lmms-lab/VQAv2 is both."""
    groups = [f"{kind}/{annotation[kind]}" for kind in ("answer_type", "question_type") if annotation.get(kind)]
    answers = [one if isinstance(one, str) else one["answer"] for one in annotation.get("answers") or []]
    return Asked(question["question"], answers, question["question_id"], groups)


def of_okvqa(row: Any) -> Asked:
    """A row of lmms-lab/OK-VQA, which holds the fields of question and annotation, and the answers as a list of texts.

    The row's question id is text; it becomes a number here, as the official evaluation expects.
    """
    return of_vqa({**row, "question_id": int(row["question_id"])}, row)


# ---- referring expressions ----

LMMS_SPLITS = {  # what lmms-lab's rows hold in the splits that are no standard ones
    "refcoco": {"val": "unc's 3,811 rows and google's 5,000", "test": "google's 5,000 rows"},
    "refcocog": {"val": "umd's 2,573 rows and google's 5,000"},
}


def lmms_notes(dataset: str | None, splits: Iterable[str]) -> list[str]:
    """One line for each of the given splits of lmms-lab that is not a standard split.

    >>> lmms_notes("refcoco", ["val", "testA"])
    ["val holds unc's 3,811 rows and google's 5,000: no standard split; google's share images with the training split"]
    """
    known = LMMS_SPLITS.get(dataset or "", {})
    shared = "no standard split; google's share images with the training split"
    return [f"{split} holds {known[split]}: {shared}" for split in splits if split in known]


# ---- programming ----


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of MBPP, HumanEval or this project's form as a row of this project's form.

    The keys of a row are "id", "question", "tests", "setup", "entry_point" and "reference". For MBPP, the setup
    contains the imports of the reference, because the tests use them too.
    """
    if "test_list" in record:
        reference = record["code"].replace("\r\n", "\n")
        setup = [record.get("test_setup_code") or "", *(record.get("test_imports") or []), *_imports(reference)]
        return {
            "id": f"mbpp-{record['task_id']}",
            "question": record["text"] if "text" in record else record["prompt"],
            "tests": list(record["test_list"]),
            "setup": "\n".join(dict.fromkeys(filter(None, setup))),
            "entry_point": None,
            "reference": reference,
        }
    if "canonical_solution" in record:
        return {
            "id": str(record["task_id"]),
            "question": "Complete this Python function. Write the whole function.\n\n" + record["prompt"],
            "tests": record["test"],
            "setup": record["prompt"],
            "entry_point": record["entry_point"],
            "reference": record["prompt"] + record["canonical_solution"],
        }
    if not isinstance(record["id"], str | int):
        raise TypeError(f"the id is {record['id']!r}; it must be text or a whole number")
    known = {"setup": "", "entry_point": None, "reference": ""}
    own = {"id": str(record["id"]), "question": record["question"], "tests": record["tests"]}
    return own | {key: record.get(key) or value for key, value in known.items()}


def _imports(code: str) -> list[str]:
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return []
    return [ast.unparse(statement) for statement in body if isinstance(statement, ast.Import | ast.ImportFrom)]
