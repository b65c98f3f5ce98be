"""Referring expressions: the box of the one object that an expression means. RefCOCO, RefCOCO+, RefCOCOg, or scenes."""

import io
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.scoring import Box, box_iou, parse_box
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter

if TYPE_CHECKING:
    from datasets import Dataset

HUB = {"refcoco": "lmms-lab/RefCOCO", "refcoco+": "lmms-lab/RefCOCOplus", "refcocog": "lmms-lab/RefCOCOg"}
SCENES = {"train": 4096, "sft": 16384, "val": 256, "test": 512}  # split: samples where no limit is given

GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.refcoco` from the annotation files, "
    "'hub' for the rows of lmms-lab/RefCOCO* (evaluation splits only), or 'scenes' for generated coloured shapes."
)
QUESTION = "Please provide the bounding box coordinates of the region this sentence describes: {expression}"
SCENE_QUESTION = "Locate: {expression}"


@dataclass(frozen=True)
class Referent:
    """The box an expression means, in pixels of the original image, and a thought that finds it, if there is one."""

    box_xyxy: Box
    thought: str = ""


@dataclass(frozen=True)
class Protocol:
    """A published way to turn boxes into numbers."""

    iou: Callable[[Sequence[float], Sequence[float]], float]
    is_hit: Callable[[float], bool]
    note: str
    grow: float = 0.0
    """Pixels added to x2 and y2 of every reference box."""
    subset: int | None = None
    """Evaluation samples, drawn as Python's random.shuffle with seed 42 does; None for all."""
    more_metrics: bool = False
    """Whether to add accuracies at other thresholds and of the centre."""


def iou_of_wide_overlaps(first: Sequence[float], second: Sequence[float]) -> float:
    """IoU as VLM-R1 computes it: an overlap no wider or no higher than one pixel counts as none."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return box_iou(first, second) if min(width, height) > 1 else 0.0


BOXES = "continuous xyxy boxes in original pixels; an answer without a box counts as a miss"
PROTOCOLS = {
    "standard": Protocol(box_iou, lambda iou: iou >= 0.5, f"hit: IoU >= 0.5; {BOXES}"),
    "vlm-r1": Protocol(
        iou_of_wide_overlaps,
        lambda iou: iou > 0.5,
        f"hit: IoU > 0.5; {BOXES}; reference boxes one pixel wider and higher; overlaps of one pixel or less count 0; "
        "evaluated on the first 2000 samples after a shuffle with seed 42",
        grow=1.0,
        subset=2000,
    ),
    "lmms-eval": Protocol(
        box_iou,
        lambda iou: iou >= 0.5,
        f"hit: IoU >= 0.5, and accuracies at .1 .3 .7 .9 and of the centre; {BOXES}",
        more_metrics=True,
    ),
}
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


class RefCOCO(TaskAdapter):
    """One image, one expression, one box; the reward is the IoU.

    `data` is "scenes", "hub" or a folder with {split}.jsonl, `limit` the most samples of a split, `protocol` one of
    PROTOCOLS, `question` the text of the question with {expression} in it, `seed` chooses the scenes.
    """

    coordinates: ClassVar[bool] = True
    headline: ClassVar[str] = "acc@0.5"
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
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise UserError(
                f"task_args.limit is {limit!r}; accepted: a whole number from 1, or nothing for all samples"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UserError(f"task_args.seed is {seed!r}; accepted: a whole number from 0")
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
            every = hub_samples(_load_hub(HUB[self.dataset], split), split, question, grow)
        else:
            every = _read_folder(Path(self.data), split, question, grow)
        chosen = list(range(len(every)))
        if self.protocol.subset is not None and split != "train":
            random.Random(42).shuffle(chosen)
            chosen = chosen[: self.protocol.subset]
        return every.take(chosen[: self.limit])

    def reward(self, sample: Sample, answer: str) -> Reward:
        box = parse_box(answer)
        iou = 0.0 if box is None else self.protocol.iou(box, sample.target.box_xyxy)
        parts = {"iou": iou, "acc@0.5": float(self.protocol.is_hit(iou)), "parsed": float(box is not None)}
        return Reward(iou, parts)

    def reference_answer(self, sample: Sample) -> str:
        return json.dumps([round(side, 4) for side in sample.target.box_xyxy])

    def reference_thought(self, sample: Sample) -> str:
        return sample.target.thought

    def metrics(self, samples: Sequence[Sample], answers: Sequence[str], rewards: Sequence[Reward]) -> dict[str, float]:
        """Acc@0.5, mean IoU and the share of answers with a box, by the protocol; denominator: the samples."""
        ious = [reward.parts["iou"] for reward in rewards]
        metrics = {
            "acc@0.5": _mean([reward.parts["acc@0.5"] for reward in rewards]),
            "mean_iou": _mean(ious),
            "parsed": _mean([reward.parts["parsed"] for reward in rewards]),
        }
        if self.protocol.more_metrics:
            metrics |= {
                f"acc@{threshold}": _mean([float(iou >= threshold) for iou in ious]) for threshold in THRESHOLDS
            }
            centred = [
                float(_centre_lies_within(parse_box(answer), sample.target.box_xyxy))
                for sample, answer in zip(samples, answers, strict=True)
            ]
            metrics["centre_acc"] = _mean(centred)
        return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _centre_lies_within(box: Box | None, target: Box) -> bool:
    if box is None:
        return False
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return target[0] <= x <= target[2] and target[1] <= y <= target[3]


def _grown(box: Sequence[float], pixels: float) -> Box:
    return (float(box[0]), float(box[1]), float(box[2]) + pixels, float(box[3]) + pixels)


def _scenes(split: str, limit: int | None, seed: int, question: str, grow: float) -> LazySamples:
    """Generated scenes, drawn on access."""
    if split not in SCENES:
        raise UserError(f"generated scenes have no split {split!r}; they have: {', '.join(SCENES)}")

    def make(index: int) -> Sample:
        from data_scripts.tiny_scenes import make_scene

        scene = make_scene(split, index, seed)
        target = Referent(_grown(scene.box_xyxy, grow), scene.thought)
        return Sample(scene.id, [scene.image], question.replace("{expression}", scene.expression), target)

    return LazySamples([f"{split}-{seed}-{index:06d}" for index in range(limit or SCENES[split])], make)


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
    with path.open(encoding="utf-8") as lines:
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


def _load_hub(repository: str, split: str) -> "Dataset":
    import datasets

    try:
        return datasets.load_dataset(repository, split=split)
    except ValueError as error:
        raise UserError(
            f"{repository} has no split {split!r} ({error}). It holds evaluation splits only: make the training split "
            "with `python -m data_scripts.refcoco`, and give its folder as task_args.data."
        ) from error
    except OSError as error:
        raise UserError(f"{repository} cannot be read from the hub: {error}. {GET_DATA}") from error


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
        return Sample(sample_id, HubImage(images, number), question.replace("{expression}", sentence), target)

    return LazySamples([row[0] for row in rows], make)


class HubImage(Sequence):
    """The image of one row, decoded when it is asked for."""

    def __init__(self, images: "Dataset", number: int):
        self._images, self._number = images, number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(1)[index]]
        if index not in (0, -1):
            raise IndexError(index)
        stored = self._images[self._number]["image"]
        try:
            with Image.open(stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"row {self._number}: the image {stored['path']!r} cannot be read: {error}") from error
