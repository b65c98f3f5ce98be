"""The RefCOCO adapter: rewards and metrics by hand, its three sources, and what it refuses."""

import json
import random

import pytest
from PIL import Image

from tasks.refcoco import QUESTION, HubImages, RefCOCO, Referent, hub_samples
from vlm_grpo.common.errors import UserError
from vlm_grpo.task import Sample, check_samples, check_task, find_task


def sample(box=(0.0, 0.0, 100.0, 100.0), sample_id="a"):
    return Sample(sample_id, [Image.new("RGB", (200, 150))], "Where?", Referent(box))


def write_split(folder, split, count, box=(10, 20, 60, 80)):
    (folder / "images").mkdir(exist_ok=True)
    rows = []
    for index in range(count):
        Image.new("RGB", (100, 90), (index % 256, 0, 0)).save(folder / "images" / f"{split}{index}.png")
        rows.append(
            {"id": f"{split}-{index}", "image": f"images/{split}{index}.png", "expression": f"thing {index}"}
            | {"bbox_xyxy": list(box), "width": 100, "height": 90}
        )
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hub_dataset(count=3):
    """Rows with the columns and types of lmms-lab/RefCOCO."""
    import datasets

    features = datasets.Features(
        {
            "question_id": datasets.Value("string"),
            "image": datasets.Image(),
            "question": datasets.Value("string"),
            "answer": datasets.Sequence(datasets.Value("string")),
            "segmentation": datasets.Sequence(datasets.Value("float32")),
            "bbox": datasets.Sequence(datasets.Value("float32")),
            "iscrowd": datasets.Value("int8"),
            "file_name": datasets.Value("string"),
        }
    )
    rows = [
        {
            "question_id": str(1700 + index),
            "image": Image.new("RGB", (64, 48 + index), (10 * index, 0, 0)),
            "question": "Please provide a short description",
            "answer": [f"left thing {index}", f"thing {index} {{odd}}"],
            "segmentation": [1.0, 2.0],
            "bbox": [4.5, 8.25, 20.0, 30.0],
            "iscrowd": 0,
            "file_name": f"COCO_train2014_{index}.jpg",
        }
        for index in range(count)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def test_the_reward_is_the_iou():
    task = RefCOCO(data="scenes")
    reward = task.reward(sample(), "[0, 0, 100, 50]")
    assert reward.value == 0.5  # half of the reference, nothing outside
    assert reward.parts == {"iou": 0.5, "acc@0.5": 1.0, "parsed": 1.0}
    assert task.reward(sample(), "[50, 0, 150, 100]").value == pytest.approx(5000 / 15000)
    assert task.reward(sample(), "over there").parts == {"iou": 0.0, "acc@0.5": 0.0, "parsed": 0.0}


def test_listing_many_boxes_earns_no_more_than_the_first():
    task = RefCOCO(data="scenes")
    assert task.reward(sample(), "[100, 100, 150, 150], [0, 0, 100, 100]").value == 0.0


def test_a_box_in_another_scale_earns_what_it_says():
    # 0-1 and 0-1000 boxes are never rescaled here: conversion happened before, by the model's family.
    task = RefCOCO(data="scenes")
    assert task.reward(sample(), "[0, 0, 1, 1]").value == pytest.approx(1 / 10000)


def test_vlm_r1_counts_strictly_and_drops_thin_overlaps():
    task = RefCOCO(data="scenes", protocol="vlm-r1")
    assert task.reward(sample(), "[0, 0, 100, 50]").parts["acc@0.5"] == 0.0  # IoU 0.5 is no hit
    assert task.reward(sample(), "[0, 0, 100, 51]").parts["acc@0.5"] == 1.0
    assert task.reward(sample(), "[99, 0, 199, 100]").value == 0.0  # one column of overlap
    # Two columns of 100 rows overlap, of 10000 + 10000 - 200 in all.
    assert task.reward(sample(), "[98, 0, 198, 100]").value == pytest.approx(200 / 19800)


@pytest.mark.slow
def test_vlm_r1_evaluates_the_first_2000_of_a_shuffle_with_seed_42(tmp_path):
    rows = [
        {"id": str(index), "image": "x.png", "expression": "x", "bbox_xyxy": [1, 2, 30, 40]} for index in range(2100)
    ]
    for split in ("val", "train"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    state = random.getstate()
    random.seed(42)
    expected = [row["id"] for row in rows]
    random.shuffle(expected)
    random.setstate(state)
    task = RefCOCO(data=str(tmp_path), protocol="vlm-r1")
    evaluated = task.samples("val")
    assert [one.id for one in evaluated] == expected[:2000]
    assert evaluated[0].target.box_xyxy == (1, 2, 31, 41)  # VLM-R1's files add one pixel
    assert len(task.samples("train")) == 2100
    scenes = [one.id for one in RefCOCO(data="scenes", limit=256).samples("val")]
    random.Random(42).shuffle(scenes)
    assert [one.id for one in RefCOCO(data="scenes", protocol="vlm-r1").samples("val")] == scenes


def test_metrics_by_hand():
    answers = ["[0, 0, 100, 100]", "[0, 0, 100, 40]", "[40, 40, 160, 160]", "none"]
    samples = [sample(sample_id=str(index)) for index in range(4)]
    task = RefCOCO(data="scenes", protocol="lmms-eval")
    rewards = [task.reward(one, answer) for one, answer in zip(samples, answers, strict=True)]
    third = 60 * 60 / (100 * 100 + 120 * 120 - 60 * 60)  # 0.173
    assert task.metrics(samples, answers, rewards) == pytest.approx(
        {
            "acc@0.5": 0.25,
            "mean_iou": (1 + 0.4 + third) / 4,
            "parsed": 0.75,
            "acc@0.1": 0.75,
            "acc@0.3": 0.5,
            "acc@0.7": 0.25,
            "acc@0.9": 0.25,
            "centre_acc": 0.75,  # the third centre, (100, 100), lies on the corner of the reference
        }
    )
    assert set(RefCOCO(data="scenes").metrics(samples, answers, rewards)) == {"acc@0.5", "mean_iou", "parsed"}


def test_every_protocol_states_its_threshold():
    assert "IoU >= 0.5" in RefCOCO(data="scenes").metric_note
    assert "IoU > 0.5" in RefCOCO(data="scenes", protocol="vlm-r1").metric_note
    assert "generated scenes" in RefCOCO(data="scenes").metric_note


def test_scenes_are_a_valid_task():
    task = find_task("refcoco", {"data": "scenes", "limit": 5})
    for split in ("train", "val", "test", "sft"):
        check_task(task, split)
    first = task.samples("train")[0]
    assert first.question.startswith("Locate: ")
    assert task.reference_thought(first)


def test_scene_ids_are_known_before_the_scenes_are_drawn():
    samples = RefCOCO(data="scenes", limit=3, seed=7).samples("val")
    assert samples.ids == [one.id for one in samples]
    assert [one.id for one in samples[1:]] == samples.ids[1:]


def test_scenes_of_different_splits_differ():
    task = RefCOCO(data="scenes")
    pixels = [task.samples(split)[0].images[0].tobytes() for split in ("train", "val", "test", "sft")]
    assert len(set(pixels)) == 4


def test_a_folder_is_a_valid_task(tmp_path):
    write_split(tmp_path, "train", 4)
    task = find_task("refcoco", {"data": str(tmp_path), "limit": 3})
    check_task(task)
    samples = task.samples("train")
    assert len(samples) == 3
    assert samples[2].question == QUESTION.replace("{expression}", "thing 2")
    assert samples[2].images[0] == tmp_path / "images/train2.png"
    assert task.reference_answer(samples[2]) == "[10.0, 20.0, 60.0, 80.0]"


def test_only_as_many_rows_as_the_limit_are_read(tmp_path):
    row = {"image": "x.png", "expression": "x", "bbox_xyxy": [1, 2, 30, 40]}
    rows = [json.dumps(row | {"id": str(index)}) for index in range(3)]
    (tmp_path / "val.jsonl").write_text("\n".join([*rows, "no row"]))
    assert RefCOCO(data=str(tmp_path), limit=3).samples("val").ids == ["0", "1", "2"]
    assert hub_samples(hub_dataset(), "val", limit=3).ids == ["val-1700-0-0", "val-1700-0-1", "val-1701-1-0"]


def test_a_corrupt_image_is_named(tmp_path):
    write_split(tmp_path, "train", 2)
    (tmp_path / "images/train1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"'train-1'.*train1\.png"):
        check_task(RefCOCO(data=str(tmp_path)))


def test_without_data_the_user_is_told_how_to_get_it():
    with pytest.raises(UserError, match=r"task_args\.data.*python -m data_scripts\.refcoco.*scenes"):
        find_task("refcoco", {})
    assert find_task("refcoco", dict(RefCOCO.demo_args)).data == "scenes"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"data": "/nowhere/at/all"}, "'/nowhere/at/all', which is no folder"),
        ({"data": "scenes", "dataset": "refcoco++"}, "accepted: refcoco, refcoco+, refcocog"),
        ({"data": "scenes", "protocol": "mine"}, "accepted: standard, vlm-r1, lmms-eval"),
        (
            {"data": "scenes", "dataset": "refcoco+"},
            "task_args.dataset=refcoco+ names rows on the hub, and task_args.data is",
        ),
        ({"data": "folder", "seed": 1}, "task_args.seed is 1, which chooses generated scenes, and task_args.data is"),
        ({"data": "scenes", "limit": 0}, "limit is 0"),
        ({"data": "scenes", "limit": "ten"}, "limit is 'ten'"),
        ({"data": "scenes", "question": "Where?"}, "must hold {expression}"),
        ({"data": "scenes", "split": "val"}, "unknown argument task_args.split"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(UserError) as caught:
        find_task("refcoco", args).samples("val")
    assert message in str(caught.value)


def test_an_unknown_split_lists_the_splits_there_are(tmp_path):
    write_split(tmp_path, "testA", 1)
    with pytest.raises(UserError, match=r"val\.jsonl is missing; splits in .*: testA"):
        RefCOCO(data=str(tmp_path)).samples("val")
    with pytest.raises(UserError, match="they have: train, sft, val, test"):
        RefCOCO(data="scenes").samples("testA")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "val.jsonl:2"),
        ('{"id": "a", "image": "a.png", "expression": "x"}', "the key 'bbox_xyxy' is missing"),
        ('{"id": "a", "image": "a.png", "expression": "x", "bbox_xyxy": [1, 2, 3]}', "expected 4, got 3"),
        ('{"id": "a", "image": "a.png", "expression": "x", "bbox_xyxy": [3, 2, 3, 9]}', "is empty"),
        ('{"id": "a", "image": "a.png", "expression": "x", "bbox_xyxy": [3, 2, Infinity, 9]}', "is empty"),
        ('{"id": "a", "image": "a.png", "expression": 7, "bbox_xyxy": [1, 2, 3, 9]}', "must be str, not int"),
        ('{"id": 7, "image": "a.png", "expression": "x", "bbox_xyxy": [1, 2, 3, 9]}', "ids are text"),
        ("[1, 2]", "val.jsonl:2"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, message):
    good = '{"id": "b", "image": "b.png", "expression": "x", "bbox_xyxy": [1, 2, 3, 4]}'
    (tmp_path / "val.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(UserError) as caught:
        RefCOCO(data=str(tmp_path)).samples("val")[1]
    assert message in str(caught.value) and "val.jsonl:2" in str(caught.value)


def test_empty_split_and_duplicate_ids_are_named(tmp_path):
    (tmp_path / "val.jsonl").write_text("")
    row = {"id": "same", "image": "b.png", "expression": "x", "bbox_xyxy": [1, 2, 3, 4]}
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    task = RefCOCO(data=str(tmp_path))
    with pytest.raises(UserError, match="'val' is empty"):
        check_samples(task.samples("val"), "val")
    with pytest.raises(UserError, match="'same' stands at items 0 and 1"):
        check_samples(task.samples("test"), "test")


def test_hub_rows_give_one_sample_per_sentence():
    samples = hub_samples(hub_dataset(), "val")
    check_samples(samples, "val")
    assert len(samples) == 6
    assert samples[3].question == QUESTION.replace("{expression}", "thing 1 {odd}")
    assert samples[3].target.box_xyxy == (4.5, 8.25, 24.5, 38.25)
    assert [image.size for image in samples[3].images] == [(64, 49)]
    assert samples[3].images[0].getpixel((0, 0)) == (10, 0, 0)


def test_the_hub_source_reads_the_named_repository(monkeypatch):
    import datasets

    asked = []

    def load(repository, split):
        asked.append((repository, split))
        return hub_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    check_task(RefCOCO(data="hub", dataset="refcocog", limit=4), "test")
    check_task(RefCOCO(data="hub", dataset="refcoco+", limit=4), "testA")
    assert set(asked) == {("lmms-lab/RefCOCOg", "test"), ("lmms-lab/RefCOCOplus", "testA")}


def test_a_hub_that_cannot_be_reached_or_lacks_the_split_is_explained(monkeypatch):
    import datasets

    def raising(error):
        def load(repository, split):
            raise error

        return load

    monkeypatch.setattr(datasets, "load_dataset", raising(ValueError("Unknown split 'train'")))
    with pytest.raises(UserError, match=r"no split 'train'.*data_scripts"):
        RefCOCO(data="hub").samples("train")
    monkeypatch.setattr(datasets, "load_dataset", raising(ConnectionError("offline")))
    with pytest.raises(UserError, match="cannot be read from the hub: offline"):
        RefCOCO(data="hub").samples("val")


def test_a_corrupt_hub_image_names_its_row():
    import datasets

    dataset = hub_dataset(1).cast_column("image", datasets.Image(decode=False))
    broken = dataset.map(lambda row: {"image": {"bytes": b"broken", "path": "x.jpg"}})
    with pytest.raises(UserError, match=r"row 0.*'x\.jpg'"):
        HubImages(broken, 0)[0]
