"""Demand: the object that fulfils a need, by box and name."""

import io
import json
import random
import tracemalloc
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_scripts import demand as script
from data_scripts.writing import run_script
from tasks._generated.scenes import make_scene
from tasks.demand import Demand, DemandTask, Thing
from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring import box_iou
from vlm_grpo.task import Sample, check_task, find_task
from vlm_grpo.task.check import JUNK_ANSWERS

CUP, BOTTLE = (10.0, 10.0, 50.0, 60.0), (70.0, 20.0, 90.0, 80.0)
SAMPLE = Sample("a", [], "q", Demand((Thing("cup", CUP), Thing("Water bottle", BOTTLE))))
TASK = DemandTask("scenes")


def run(*arguments: str) -> int:
    return run_script(script.__doc__, script.OPTIONS, script.convert, arguments)


def value(answer: str) -> float:
    return TASK.reward(SAMPLE, answer).value


def said(label: str, box) -> str:
    return json.dumps({"label": label, "bbox_2d": list(box)})


def test_scenes_are_a_task_with_thoughts():
    adapter = find_task("demand", {}, demo=True)
    check_task(adapter, "train", limit=16)
    sample = adapter.samples("val")[0]
    colour = make_scene("val", 0).expression.split()[-2]
    assert sample.question == f"Locate: a {colour} shape"
    assert adapter.reference_thought(sample).startswith(colour)
    assert {thing.label for thing in sample.target.fulfilling} == {colour}


def test_box_and_name_make_the_reward():
    assert value(said("cup", CUP)) == 1
    assert value(said("water BOTTLE", BOTTLE)) == value(said("the water bottle", BOTTLE)) == 1
    assert value(said("bottle", CUP)) == value(json.dumps(list(CUP))) == 0.5  # the box alone
    assert value("cup [10, 10, 50, 60]") == value("A cup: (10,10),(50,60)") == 1
    assert value(said("cup", (10, 10, 50, 35))) == pytest.approx(0.5)
    assert value(said("cup", (200, 200, 210, 210))) == value("cup") == value("") == 0
    parts = TASK.reward(SAMPLE, said("cup", (10, 10, 50, 40))).parts
    assert parts == {"iou": pytest.approx(0.6), "label": 1, "success": 1, "acc@0.5": 1, "parsed": 1}
    assert TASK.reward(SAMPLE, said("dog", CUP)).parts["success"] == 0


def test_listing_names_or_boxes_or_the_whole_image_does_not_help():
    whole = (0, 0, 100, 100)
    assert value(said("cup", whole)) == pytest.approx(2000 / 10000)
    boxes = [{"label": "cup", "bbox_2d": list(box)} for box in ((0, 0, 5, 5), CUP, BOTTLE)]
    assert value(json.dumps(boxes)) == 0
    assert value(json.dumps(boxes[::-1])) == 0.5  # the first box counts, with its own name
    assert value(said("cup, bottle, water bottle, dog", CUP)) == 0.5
    assert value(f"{said('cup', CUP)} " * 50) == 1
    assert [value(junk) for junk in JUNK_ANSWERS] == [0.0] * len(JUNK_ANSWERS)


@pytest.mark.slow
def test_the_reward_is_the_formula_written_out():
    rng = random.Random(0)
    for _ in range(500):
        x, y = rng.randint(0, 80), rng.randint(0, 80)
        box = (x, y, x + rng.randint(1, 60), y + rng.randint(1, 60))
        label = rng.choice(["cup", "water bottle", "dog"])
        expected = max(
            box_iou(box, thing.box_xyxy) * (1.0 if label == thing.label.lower() else 0.5)
            for thing in SAMPLE.target.fulfilling
        )
        assert value(said(label, box)) == pytest.approx(expected)


@settings(max_examples=120, deadline=None)
@given(st.one_of(st.text(max_size=60), st.text('[]{}(),:"0123456789 cuplabe_2d', max_size=80)))
def test_any_text_has_a_reward_up_to_the_golds(text: str):
    assert 0 <= value(text) <= 1


def test_metrics_are_means_over_samples():
    answers = [said("cup", CUP), said("dog", CUP), "none", said("cup", (10, 10, 50, 30))]
    metrics = TASK.metrics([SAMPLE] * 4, answers, [TASK.reward(SAMPLE, answer) for answer in answers])
    expected = {
        "reward": (1 + 0.5 + 0 + 0.4) / 4,
        "success": 0.25,
        "acc@0.5": 0.5,
        "iou": 0.6,
        "label": 0.5,
        "parsed": 0.75,
    }
    assert metrics == pytest.approx(expected)


# ---- the data script ----


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("1.jpg", "2.jpg"):
        Image.new("RGB", (100, 90)).save(tmp_path / "images" / name)
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 100, "height": 90} for i in (1, 2)],
        "categories": [{"id": 3, "name": "cup"}, {"id": 4, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 3, "bbox": [10, 10, 40, 50], "iscrowd": 0},
            {"id": 2, "image_id": 1, "category_id": 4, "bbox": [60, 20.2, 40.3, 60], "iscrowd": 0},
            {"id": 3, "image_id": 1, "category_id": 3, "bbox": [0, 0, 99, 9], "iscrowd": 1},
            {"id": 4, "image_id": 2, "category_id": 3, "bbox": [0, 0, 9, 9], "iscrowd": 0},
            {"id": 5, "image_id": 2, "category_id": 4, "bbox": [5, 5, 9, 0], "iscrowd": 0},
        ],
    }
    (tmp_path / "instances.json").write_text(json.dumps(content))
    (tmp_path / "needs.json").write_text(json.dumps({"I am thirsty.": ["cup"], "I want to play.": ["dog"]}))
    return tmp_path


def test_coco_and_needs_become_rows(coco: Path, capsys: pytest.CaptureFixture[str]):
    options = [f"annotations={coco / 'instances.json'}", f"images={coco / 'images'}", f"needs={coco / 'needs.json'}"]
    assert run(f"out={coco / 'out'}", *options) == 0
    assert "val: 2 needs (no official count known)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (coco / "out/val.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["val-1-0", "val-1-1"]  # image 2 has nothing to choose from
    assert rows[0]["objects"] == [
        {"label": "cup", "bbox_xyxy": [10, 10, 50, 60], "fulfils": True},
        {"label": "dog", "bbox_xyxy": [60, 20.2, 100, 80.2], "fulfils": False},
    ]
    adapter = DemandTask(str(coco / "out"))
    check_task(adapter, "val")
    assert adapter.samples("val")[0].question.startswith("I am thirsty.\nWhich object")
    assert run(f"out={coco / 'one'}", *options, "--limit", "1") == 0
    assert len(DemandTask(str(coco / "one")).samples("val")) == 1
    (coco / "needs.json").write_text('{"I am thirsty.": ["bottle"]}')
    assert run(f"out={coco / 'two'}", *options) == 2
    assert "names categories that" in capsys.readouterr().err


@pytest.mark.slow
def test_boxes_of_coco_are_not_held_in_memory(coco: Path):
    content = json.loads((coco / "instances.json").read_text())
    content["images"] = [content["images"][0] | {"id": i} for i in range(200)]
    box = {"bbox": [10, 10, 40, 50], "iscrowd": 0}
    content["annotations"] = [
        {"id": 200 * n + i, "image_id": i, "category_id": 3 + n % 2} | box for n in range(100) for i in range(200)
    ]
    (coco / "instances.json").write_text(json.dumps(content))
    options = [f"annotations={coco / 'instances.json'}", f"images={coco / 'images'}", f"needs={coco / 'needs.json'}"]
    tracemalloc.start()
    assert run(f"out={coco / 'out'}", *options) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6  # of 20,000 boxes, which take 10 MB as lists
    assert [path.name for path in (coco / "out").iterdir()] == ["val.jsonl"]


def test_rows_and_scenes_become_rows(coco: Path, capsys: pytest.CaptureFixture[str]):
    thing = {"label": "cup", "bbox_xyxy": [10, 10, 50, 60], "fulfils": True}
    good = {"image": "1.jpg", "need": "I am thirsty.", "objects": [thing]}
    (coco / "rows.jsonl").write_text(json.dumps(good) + "\n")
    options = [f"data={coco / 'rows.jsonl'}", f"images={coco / 'images'}", "split=train"]
    assert run(f"out={coco / 'out'}", *options) == 0
    check_task(DemandTask(str(coco / "out")), "train")
    bad = [
        {**good, "objects": [{**thing, "fulfils": False}]},
        {**good, "objects": [{**thing, "bbox_xyxy": [10, 10, 150, 60]}]},
        {**good, "objects": [{"label": "cup"}]},
        {**good, "image": "none.jpg"},
        {**good, "objects": [{**thing, "bbox_xyxy": [1, 2, 3]}]},
    ]
    (coco / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    assert run(f"out={coco / 'bad'}", *options) == 2
    message = capsys.readouterr().err
    for problem in (
        "whose need no object fulfils: train-0",
        "leave their image: train-1",
        "fulfils: train-2, train-4",
        "1 images missing",
    ):
        assert problem in message
    assert run(f"out={coco / 'scenes'}", "scenes=3", "split=val") == 0
    check_task(DemandTask(str(coco / "scenes")), "val")
    with Image.open(coco / "scenes/images/val-0-000000.png") as image:
        file = io.BytesIO()
        image.save(file, "png")
    assert run(f"out={coco / 'o'}", "scenes=3", f"data={coco / 'rows.jsonl'}") == 2
    assert "give one of annotations=…, data=…, scenes=…; given: data, scenes" in capsys.readouterr().err


def test_equal_ids_of_two_splits_keep_their_own_images(tmp_path: Path):
    thing = {"label": "cup", "bbox_xyxy": [1, 1, 5, 6], "fulfils": True}
    features = {"id": datasets.Value("int64"), "image": datasets.Image(), "need": datasets.Value("string")}
    features["objects"] = [{"label": datasets.Value("string"), "bbox_xyxy": [datasets.Value("float64")]}]
    features["objects"][0]["fulfils"] = datasets.Value("bool")
    sizes = {"train": (20, 10), "validation": (30, 40)}
    for split, size in sizes.items():
        row = {"id": 0, "image": Image.new("RGB", size), "need": "I am thirsty.", "objects": [thing]}
        rows = datasets.Dataset.from_list([row], features=datasets.Features(features))
        rows.to_parquet(tmp_path / f"needs/{split}-00000-of-00001.parquet")
        assert run(f"out={tmp_path / 'out'}", f"data={tmp_path / 'needs'}", f"split={split}") == 0
    for split, size in (("train", (20, 10)), ("val", (30, 40))):
        [sample] = DemandTask(str(tmp_path / "out")).samples(split)
        with Image.open(sample.images[0]) as image:
            assert image.size == size


def test_bad_rows_and_arguments_are_errors(tmp_path: Path):
    with pytest.raises(UserError, match="task demand has no data"):
        DemandTask()
    with pytest.raises(UserError, match=r"must hold \{need\}"):
        DemandTask("scenes", question="what?")
    row = {
        "id": "a",
        "image": "1.png",
        "need": "n",
        "objects": [{"label": "", "bbox_xyxy": [1, 2, 3, 4], "fulfils": True}],
    }
    (tmp_path / "val.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"val.jsonl:1: .*has no name, or an empty box"):
        DemandTask(str(tmp_path)).samples("val")[0]
    row["objects"] = [{"label": "x", "bbox_xyxy": [1, 2, 3, 4], "fulfils": False}]
    (tmp_path / "val.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"val.jsonl:1: .*none of its objects fulfils"):
        DemandTask(str(tmp_path)).samples("val")[0]
