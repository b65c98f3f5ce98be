"""Referring expressions: the box of the object that an expression means. RefCOCO, RefCOCO+, RefCOCOg, or scenes."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tasks._boxes import PROTOCOLS, BoxTask, Referent, read_box
from tasks._generated.scenes import Scene
from tasks._hub_rows import LMMS_SPLITS, lmms_notes
from tasks._rows import HubImages, check_limit, load_hub, read_rows
from tasks._scenes import check_question, check_seed, scene_samples
from vlm_grpo.scoring import Box
from vlm_grpo.task import LazySamples, Sample, UserError

if TYPE_CHECKING:
    from datasets import Dataset

HUB = {"refcoco": "lmms-lab/RefCOCO", "refcoco+": "lmms-lab/RefCOCOplus", "refcocog": "lmms-lab/RefCOCOg"}

GET_DATA = (
    "Give task_args.data: a folder made by `python -m data_scripts.refcoco` from the annotation files, "
    "'hub' for the rows of lmms-lab/RefCOCO* (evaluation splits only), or 'scenes' for generated coloured shapes."
)
QUESTION = "Please provide the bounding box coordinates of the region this sentence describes: {expression}"
SCENE_QUESTION = "Locate: {expression}"


class RefCOCO(BoxTask):
    """A task with one image and one expression, whose answer is a box; the reward is the IoU.

    `data` is "scenes", a folder with {split}.jsonl, or "hub" with a `dataset` that is a key of HUB. `limit` is the
    maximum number of samples of a split. `protocol` is one of PROTOCOLS. `question` is the prompt's text, which
    contains {expression}. `seed` chooses the scenes.
    """

    demo_args: ClassVar[dict[str, Any]] = {"data": "scenes"}

    def __init__(
        self,
        data: str | None = None,
        dataset: str | None = None,
        limit: int | None = None,
        protocol: str = "standard",
        question: str | None = None,
        seed: int = 0,
    ):
        if data is None:
            raise UserError(f"task refcoco has no data. {GET_DATA}")
        if dataset is not None and dataset not in HUB:
            raise UserError(f"task_args.dataset is {dataset!r}; accepted: {', '.join(HUB)}")
        if dataset is not None and data != "hub":
            raise UserError(
                f"task_args.dataset={dataset} names rows on the hub, and task_args.data is {data!r}: leave it out"
            )
        if protocol not in PROTOCOLS:
            raise UserError(f"task_args.protocol is {protocol!r}; accepted: {', '.join(PROTOCOLS)}")
        check_limit(limit)
        check_seed(seed, data)
        question = question or (SCENE_QUESTION if data == "scenes" else QUESTION)
        check_question(question, "{expression}")
        self.data, self.dataset, self.limit, self.question, self.seed = (
            data,
            dataset or "refcoco",
            limit,
            question,
            seed,
        )
        self.protocol = PROTOCOLS[protocol]
        source = "generated scenes" if data == "scenes" else _hub_note(self.dataset) if data == "hub" else data
        self.metric_note = f"{self.protocol.note}; data: {source}"

    def samples(self, split: str) -> Sequence[Sample]:
        question, grow = self.question, self.protocol.grow

        def make(row: dict[str, Any], folder: Path) -> Sample:
            asked = question.replace("{expression}", row["expression"])
            return Sample(row["id"], [folder / row["image"]], asked, Referent(_grown(read_box(row["bbox_xyxy"]), grow)))

        def read(limit: int | None) -> LazySamples:
            if self.data == "scenes":
                return _scenes(split, limit, self.seed, question, grow)
            if self.data == "hub":
                rows = load_hub(HUB[self.dataset], None, split, GET_DATA)
                return hub_samples(rows, split, question, grow, limit)
            return read_rows(self.data, split, make, "refcoco", limit, ("image", "expression", "bbox_xyxy"))

        return self.protocol_samples(read, split, self.limit)


def _hub_note(dataset: str) -> str:
    """A note with the data set's name on the hub and those of its splits that are not standard."""
    return "; ".join([HUB[dataset], *lmms_notes(dataset, LMMS_SPLITS.get(dataset, ()))])


def _grown(box: Sequence[float], pixels: float) -> Box:
    return (float(box[0]), float(box[1]), float(box[2]) + pixels, float(box[3]) + pixels)


def _scenes(split: str, limit: int | None, seed: int, question: str, grow: float) -> LazySamples:
    def make(scene: Scene) -> Sample:
        target = Referent(_grown(scene.box_xyxy, grow), scene.thought)
        return Sample(scene.id, [scene.image], question.replace("{expression}", scene.expression), target)

    return scene_samples(split, limit, seed, make)


def hub_samples(
    dataset: "Dataset", split: str, question: str = QUESTION, grow: float = 0.0, limit: int | None = None
) -> LazySamples:
    """The samples of lmms-lab/RefCOCO*, at most `limit`: one for each sentence in a row's `answer`.

    Images are decoded on access.
    """
    import datasets

    missing = {"image", "bbox", "answer", "question_id"} - set(dataset.column_names)
    if missing:
        raise UserError(f"split {split!r}: rows lack {sorted(missing)}; they have {dataset.column_names}.")
    images = dataset.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    columns = [dataset[name] for name in ("question_id", "answer", "bbox")]
    every = (
        (f"{split}-{question_id}-{number}-{at}", number, sentence, box)
        for number, (question_id, sentences, box) in enumerate(zip(*columns, strict=True))
        for at, sentence in enumerate(sentences)
    )
    rows = list(islice(every, limit))

    def make(index: int) -> Sample:
        sample_id, number, sentence, (x, y, width, height) = rows[index]
        target = Referent(_grown((x, y, x + width, y + height), grow))
        return Sample(sample_id, HubImages(images, number), question.replace("{expression}", sentence), target)

    return LazySamples([row[0] for row in rows], make)
