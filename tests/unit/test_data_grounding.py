"""LISA-Grounding's array and COCO's instances, in small files of their shape, and what may be wrong with them."""

import json
import zipfile

import pytest
from PIL import Image

from data_scripts import coco_detection, lisa_grounding
from data_scripts.writing import run_script
from tasks.coco_detection import CocoDetection
from tasks.lisa_grounding import LisaGrounding
from vlm_grpo.task import check_task


def convert(module, **options):
    arguments = [f"{key}={value}" for key, value in options.items()]
    return run_script(module.__doc__, module.OPTIONS, module.convert, arguments)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- LISA ----


@pytest.fixture
def lisa(tmp_path):
    """lisa_test.json as in rec_jsons_processed.zip, and the images of lisa_test.zip unpacked."""
    images = tmp_path / "lisa"
    (images / "test").mkdir(parents=True)
    records = []
    for number in range(3):
        Image.new("RGB", (500, 375), (number, 0, 0)).save(images / f"test/{number}_o.jpg")
        records.append(
            {
                "image": f"test/{number}_o.jpg",
                "problem": f"the part that keeps off rain {number}",
                "normal_caption": f"umbrella {number}",
                "solution": [10.0, 20.0, 300.5, 375.5],
                "normalized_solution": [20, 53, 601, 1000],
                "height": 375,
                "width": 500,
            }
        )
    (tmp_path / "lisa_test.json").write_text(json.dumps(records))
    return tmp_path


def test_lisas_array_becomes_rows(lisa, capsys):
    out = lisa / "out"
    assert convert(lisa_grounding, out=out, annotations=lisa / "lisa_test.json", images=lisa / "lisa") == 0
    assert lines(out / "test.jsonl")[1] == {
        "id": "test-1",
        "image": "../lisa/test/1_o.jpg",
        "expression": "the part that keeps off rain 1",
        "bbox_xyxy": [10.0, 20.0, 300.5, 375.0],  # cut to the image
        "width": 500,
        "height": 375,
    }
    assert "test: 3 sentences (official 1,658, DIFFERS)" in capsys.readouterr().out
    check_task(LisaGrounding(data=str(out)), "test")


def test_lisas_archives_are_read_as_they_are(lisa):
    with zipfile.ZipFile(lisa / "rec_jsons_processed.zip", "w") as archive:
        archive.write(lisa / "lisa_test.json", "rec_jsons_processed/lisa_test.json")
        archive.writestr("rec_jsons_processed/refcoco_val.json", "[]")
    with zipfile.ZipFile(lisa / "lisa_test.zip", "w") as archive:
        for path in sorted((lisa / "lisa/test").iterdir()):
            archive.write(path, f"lisa_test/test/{path.name}")
    options = {"annotations": lisa / "rec_jsons_processed.zip", "images": lisa / "lisa_test.zip", "limit": 2}
    assert convert(lisa_grounding, out=lisa / "out", **options) == 0
    assert [row["id"] for row in lines(lisa / "out/test.jsonl")] == ["test-0", "test-1"]
    check_task(LisaGrounding(data=str(lisa / "out")), "test")


def test_problems_may_have_vlm_r1s_words_or_only_a_caption(lisa):
    records = json.loads((lisa / "lisa_test.json").read_text())
    records[0]["problem"] = "Please provide the bounding box of the region this sentence describes: the roof."
    del records[1]["problem"]
    (lisa / "lisa_test.json").write_text(json.dumps(records))
    assert convert(lisa_grounding, out=lisa / "out", annotations=lisa / "lisa_test.json", images=lisa / "lisa") == 0
    assert [row["expression"] for row in lines(lisa / "out/test.jsonl")[:2]] == ["the roof", "umbrella 1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solution": [10, 20, 30]}, "record 1 is not in VLM-R1's form"),
        ({"solution": [10, 20, 10, 30]}, "1 boxes that are empty or leave their image"),
        ({"solution": [10, 20, 700, 30]}, "1 boxes that are empty or leave their image"),
        ({"image": "test/none.jpg"}, "1 images missing"),
        ({"width": 375, "height": 500}, "images of another size"),
        ({"problem": None, "normal_caption": None}, "record 1 is not in VLM-R1's form"),
    ],
)
def test_a_bad_record_of_lisa_is_named_and_nothing_is_written(lisa, change, message, capsys):
    records = json.loads((lisa / "lisa_test.json").read_text())
    records[1] |= change
    (lisa / "lisa_test.json").write_text(json.dumps(records))
    assert convert(lisa_grounding, out=lisa / "out", annotations=lisa / "lisa_test.json", images=lisa / "lisa") == 2
    assert message in capsys.readouterr().err
    assert list((lisa / "out").iterdir()) == []


# ---- COCO ----


@pytest.fixture
def coco(tmp_path):
    """annotations/instances_val2017.json and val2017/, in the order of keys that COCO has."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    for image_id in (397133, 37777, 252219):
        Image.new("RGB", (64, 48)).save(tmp_path / f"val2017/{image_id:012d}.jpg")
    outline = {"segmentation": [[1.0, 2.0, 30.0, 2.0, 30.0, 40.0]]}
    runs = {"segmentation": {"counts": [272, 2, 4], "size": [48, 64]}}
    annotations = [
        outline | {"area": 702.1, "iscrowd": 0, "image_id": 37777, "bbox": [1.0, 2.0, 29.5, 38.25], "category_id": 44}
        | {"id": 82445},
        outline | {"area": 90.0, "iscrowd": 0, "image_id": 397133, "bbox": [0.0, 0.5, 63.9, 47.9], "category_id": 1}
        | {"id": 119568},
        runs | {"area": 80.0, "iscrowd": 1, "image_id": 397133, "bbox": [3.0, 4.0, 20.0, 20.0], "category_id": 1}
        | {"id": 900100},
        outline | {"area": 5.0, "iscrowd": 0, "image_id": 37777, "bbox": [10.0, 5.0, 8.0, 8.0], "category_id": 1}
        | {"id": 111},
        outline | {"area": 0.0, "iscrowd": 0, "image_id": 37777, "bbox": [10.0, 5.0, 8.0, 0.0], "category_id": 1}
        | {"id": 112},
    ]  # fmt: skip
    instances = {
        "info": {"description": "COCO 2017 Dataset", "year": 2017},
        "licenses": [{"url": "http://creativecommons.org", "id": 1, "name": "CC"}],
        "images": [
            {"license": 4, "file_name": f"{image_id:012d}.jpg", "coco_url": "", "height": 48, "width": 64}
            | {"date_captured": "2013-11-14 17:02:52", "flickr_url": "", "id": image_id}
            for image_id in (397133, 37777, 252219)
        ],
        "annotations": annotations,
        "categories": [
            {"supercategory": "person", "id": 1, "name": "person"},
            {"supercategory": "kitchen", "id": 44, "name": "bottle"},
        ],
    }
    (tmp_path / "annotations/instances_val2017.json").write_text(json.dumps(instances))
    return tmp_path


def options(folder, **others):
    annotations = folder / "annotations/instances_val2017.json"
    return {"out": folder / "out", "annotations": annotations, "images": folder / "val2017", "split": "val"} | others


def test_instances_become_one_row_per_image_with_objects(coco, capsys):
    assert convert(coco_detection, **options(coco)) == 0
    rows = lines(coco / "out/val.jsonl")
    assert [row["id"] for row in rows] == ["val-397133", "val-37777"]  # the third has no object
    assert rows[1] == {
        "id": "val-37777",
        "image": "../val2017/000000037777.jpg",
        "image_id": 37777,
        "width": 64,
        "height": 48,
        "objects": [
            {"id": 82445, "category_id": 44, "label": "bottle", "bbox_xyxy": [1.0, 2.0, 30.5, 40.25]}
            | {"area": 702.1, "iscrowd": 0},
            {"id": 111, "category_id": 1, "label": "person", "bbox_xyxy": [10.0, 5.0, 18.0, 13.0]}
            | {"area": 5.0, "iscrowd": 0},
        ],
    }
    assert rows[0]["objects"][0]["bbox_xyxy"] == [0.0, 0.5, 63.9, 48.0]
    assert rows[0]["objects"][1]["iscrowd"] == 1
    printed = capsys.readouterr().out
    assert "val: 2 images with objects" in printed
    assert "val: 3 images in the file (official 5,000, DIFFERS)" in printed
    assert "1 boxes without any area left out" in printed
    assert sorted(path.name for path in (coco / "out").iterdir()) == ["val.jsonl"]
    task = CocoDetection(data=str(coco / "out"))
    check_task(task, "val")
    assert "categories: bottle, person." in task.samples("val")[1].question


def test_cocos_archives_are_read_as_they_are(coco, capsys):
    with zipfile.ZipFile(coco / "annotations_trainval2017.zip", "w") as archive:
        archive.write(coco / "annotations/instances_val2017.json", "annotations/instances_val2017.json")
        archive.writestr("annotations/instances_train2017.json", "{}")
        archive.writestr("annotations/captions_val2017.json", "{}")
    with zipfile.ZipFile(coco / "val2017.zip", "w") as archive:
        for path in sorted((coco / "val2017").iterdir()):
            archive.write(path, f"val2017/{path.name}")
    given = options(coco, annotations=coco / "annotations_trainval2017.zip", images=coco / "val2017.zip", limit=1)
    assert convert(coco_detection, **given) == 0
    assert [row["image"] for row in lines(coco / "out/val.jsonl")] == ["images/000000397133.jpg"]
    assert "val: 1 images with objects (no official count known, limit=1)" in capsys.readouterr().out
    check_task(CocoDetection(data=str(coco / "out")), "val")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["annotations"][0].update(image_id=1), "1 annotations are of images or categories"),
        (lambda data: data["annotations"][0].update(bbox=[1, 2, 200, 4]), "boxes that leave their image"),
        (lambda data: data["annotations"][0].pop("bbox"), "not in the form of COCO's instances"),
        (lambda data: data["images"][0].update(file_name="none.jpg"), "1 images missing"),
        (lambda data: data["images"][0].update(width=48, height=64), "images of another size"),
        (lambda data: data.pop("categories"), "holds nothing at 'categories.item'"),
    ],
)  # fmt: skip
def test_bad_instances_are_named_and_nothing_is_written(coco, change, message, capsys):
    path = coco / "annotations/instances_val2017.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    assert convert(coco_detection, **options(coco)) == 2
    assert message in capsys.readouterr().err
    assert list((coco / "out").iterdir()) == []


def test_half_a_download_is_named(coco, capsys):
    path = coco / "annotations/instances_val2017.json"
    path.write_text(path.read_text()[:700])
    assert convert(coco_detection, **options(coco)) == 2
    assert "damaged or only half downloaded" in capsys.readouterr().err
