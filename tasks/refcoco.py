"""Referring expressions: the box of the one object that an expression means. RefCOCO, RefCOCO+, RefCOCOg, or scenes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks._boxes import PROTOCOLS, BoxTask, Referent
from tasks._rows import HubImages, check_limit, load_hub
from tasks._scenes import check_seed, scene_samples
from vlm_grpo.errors import UserError
from vlm_grpo.scoring import Box
from vlm_grpo.task import LazySamples, Sample

if TYPE_CHECKING:
    from datasets import Dataset

    from data_scripts.tiny_scenes import Scene

HUB = {"refcoco": "lmms-lab/RefCOCO", "refcoco+": "lmms-lab/RefCOCOplus", "refcocog": "lmms-lab/RefCOCOg"}

GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.refcoco` from the annotation files, "
    "'hub' for the rows of lmms-lab/RefCOCO* (evaluation splits only), or 'scenes' for generated coloured shapes."
)
QUESTION = "Please provide the bounding box coordinates of the region this sentence describes: {expression}"
SCENE_QUESTION = "Locate: {expression}"


class RefCOCO(BoxTask):
    """One image, one expression, one box; the reward is the IoU.

    `data` is "scenes", "hub" or a folder with {split}.jsonl, `limit` the most samples of a split, `protocol` one of
    PROTOCOLS, `question` the text of the question with {expression} in it, `seed` chooses the scenes.
    """

    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(
        self,
        data: str | None = None,
        dataset: str = "refcoco",
        limit: int | None = None,
        protocol: str = "standard",
        question: str | None = None,
        seed: int = 0,
    ):
        if data is None:
            raise UserError(f"task refcoco has no data. {GET_DATA}")
        if dataset not in HUB:
            raise UserError(f"task_args.dataset is {dataset!r}; accepted: {', '.join(HUB)}")
        if protocol not in PROTOCOLS:
            raise UserError(f"task_args.protocol is {protocol!r}; accepted: {', '.join(PROTOCOLS)}")
        check_limit(limit)
        check_seed(seed)
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        if "{expression}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{expression}}")
        self.data, self.dataset, self.limit, self.question, self.seed = data, dataset, limit, question, seed
        self.protocol = PROTOCOLS[protocol]
        source = {"scenes": "generated scenes", "hub": HUB[dataset]}.get(data, data)
        self.metric_note = f"{self.protocol.note}; data: {source}"

    def samples(self, split: str) -> Sequence[Sample]:
        question, grow = self.question, self.protocol.grow
        if self.data == "scenes":
            return _scenes(split, self.limit, self.seed, question, grow)
        if self.data == "hub":
            every = hub_samples(load_hub(HUB[self.dataset], None, split, GET_DATA), split, question, grow)
        else:
            every = _read_folder(Path(self.data), split, question, grow)
        return self.protocol_samples(every, split, self.limit)


def _grown(box: Sequence[float], pixels: float) -> Box:
    return (float(box[0]), float(box[1]), float(box[2]) + pixels, float(box[3]) + pixels)


def _scenes(split: str, limit: int | None, seed: int, question: str, grow: float) -> LazySamples:
    def make(scene: "Scene") -> Sample:
        target = Referent(_grown(scene.box_xyxy, grow), scene.thought)
        return Sample(scene.id, [scene.image], question.replace("{expression}", scene.expression), target)

    return scene_samples(split, limit, seed, make)


def _read_folder(folder: Path, split: str, question: str, grow: float) -> LazySamples:
    """The rows {"id", "image", "expression", "bbox_xyxy"} of folder/{split}.jsonl; image paths start at the folder."""
    if not folder.is_dir():
        raise UserError(f"task_args.data is {str(folder)!r}, which is no folder. {GET_DATA}")
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in folder.glob("*.jsonl"))) or "none"
        raise UserError(
            f"{path} is missing; splits in {folder}: {there}. Make it with `python -m data_scripts.refcoco`."
        )
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_read_row(line, folder, f"{path}:{number}"))

    def make(index: int) -> Sample:
        sample_id, image, expression, box = rows[index]
        return Sample(sample_id, [image], question.replace("{expression}", expression), Referent(_grown(box, grow)))

    return LazySamples([row[0] for row in rows], make)


def _read_row(line: str, folder: Path, where: str) -> tuple[str, Path, str, Box]:
    try:
        row = json.loads(line)
        x1, y1, x2, y2 = (float(side) for side in row["bbox_xyxy"])
        sample_id, image, expression = row["id"], folder / row["image"], row["expression"]
    except KeyError as error:
        raise UserError(f"{where}: the key {error} is missing; a row has id, image, expression, bbox_xyxy.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: not a row of id, image, expression and bbox_xyxy (four numbers): {error}") from error
    if not isinstance(expression, str) or not isinstance(sample_id, str):
        raise UserError(f"{where}: id and expression must be text, they are {sample_id!r} and {expression!r}.")
    if not (x1 < x2 and y1 < y2):
        raise UserError(f"{where}: the box {[x1, y1, x2, y2]} is empty; bbox_xyxy is left, top, right, bottom.")
    return sample_id, image, expression, (x1, y1, x2, y2)


def hub_samples(dataset: "Dataset", split: str, question: str = QUESTION, grow: float = 0.0) -> LazySamples:
    """Rows of lmms-lab/RefCOCO*, one sample for each sentence of a row's `answer`; images are decoded on access."""
    import datasets

    missing = {"image", "bbox", "answer", "question_id"} - set(dataset.column_names)
    if missing:
        raise UserError(f"split {split!r}: rows lack {sorted(missing)}; they have {dataset.column_names}.")
    images = dataset.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    columns = [dataset[name] for name in ("question_id", "answer", "bbox")]
    rows = [
        (f"{split}-{question_id}-{number}-{at}", number, sentence, box)
        for number, (question_id, sentences, box) in enumerate(zip(*columns, strict=True))
        for at, sentence in enumerate(sentences)
    ]

    def make(index: int) -> Sample:
        sample_id, number, sentence, (x, y, width, height) = rows[index]
        target = Referent(_grown((x, y, x + width, y + height), grow))
        return Sample(sample_id, HubImages(images, number), question.replace("{expression}", sentence), target)

    return LazySamples([row[0] for row in rows], make)
