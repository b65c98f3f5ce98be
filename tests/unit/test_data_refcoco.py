"""The three published forms of RefCOCO, in small files of exactly their shape, and what may be wrong with them."""

import json
import os
import pickle
import tracemalloc

import pytest
from PIL import Image

from data_scripts.refcoco import (
    DataError,
    dataset_of,
    expression_of,
    four_numbers,
    main,
    read_plain_pickle,
    report,
    write_splits,
)
from tasks.refcoco import RefCOCO
from vlm_grpo.task import check_task

SIZE = (100, 80)


@pytest.fixture
def coco(tmp_path):
    """refcoco/refs(unc).p and instances.json, and two images in train2014."""
    images = tmp_path / "train2014"
    images.mkdir()
    names = [f"COCO_train2014_{index:012d}.jpg" for index in (581857, 580957)]
    for name in names:
        Image.new("RGB", SIZE, (9, 90, 9)).save(images / name)
    refs = [
        {
            "sent_ids": [3 * index, 3 * index + 1],
            "file_name": names[index % 2].replace(".jpg", "_16.jpg"),
            "ann_id": 1719310 + index,
            "ref_id": index,
            "image_id": 581857 if index % 2 == 0 else 580957,
            "split": split,
            "sentences": [
                {"tokens": ["the", "lady"], "raw": "THE LADY!", "sent_id": 3 * index + at, "sent": f"lady {index} {at}"}
                for at in range(2)
            ],
            "category_id": 1,
        }
        for index, split in enumerate(("train", "train", "val", "testA", "testB"))
    ]
    instances = {
        "info": {"description": "COCO"},
        "images": [
            {"license": 1, "file_name": name, "coco_url": "", "height": 80, "width": 100, "id": image_id}
            for name, image_id in zip(names, (581857, 580957), strict=True)
        ],
        "licenses": [],
        "annotations": [
            {
                "segmentation": [[1.0, 2.0]],
                "area": 10.0,
                "iscrowd": 0,
                "image_id": ref["image_id"],
                "bbox": [10.25, 20.5, 30.0, 40.01],
                "category_id": 1,
                "id": ref["ann_id"],
            }
            for ref in refs
        ],
        "categories": [{"supercategory": "person", "id": 1, "name": "person"}],
    }
    folder = tmp_path / "refcoco"
    folder.mkdir()
    (folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
    (folder / "instances.json").write_text(json.dumps(instances))
    return tmp_path


def convert(folder, **options):
    given = {"out": folder / "out", "annotations": folder / "refcoco/refs(unc).p", "images": folder / "train2014"}
    return main([f"{key}={value}" for key, value in (given | options).items() if value is not None])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refs_and_instances_become_one_file_per_split(coco, capsys):
    assert convert(coco) == 0
    out = coco / "out"
    assert sorted(path.name for path in out.iterdir()) == ["testA.jsonl", "testB.jsonl", "train.jsonl", "val.jsonl"]
    assert lines(out / "train.jsonl")[1] == {
        "id": "train-0-1",
        "image": "../train2014/COCO_train2014_000000581857.jpg",
        "expression": "lady 0 1",
        "bbox_xyxy": [10.25, 20.5, 40.25, 60.51],  # x + width, y + height
        "width": 100,
        "height": 80,
    }
    printed = capsys.readouterr().out
    assert "train: 4 expressions (official 120,624, DIFFERS)" in printed
    assert "testB: 2 expressions (official 5,095, DIFFERS)" in printed
    check_task(RefCOCO(data=str(out)), "train")


def test_pickles_of_python_2_are_read(coco):
    path = coco / "old.p"
    # Python 2, protocol 0: [{'sent': 'the lady', u'ref_id': 5L}]
    path.write_bytes(b"(lp0\n(dp1\nS'sent'\np2\nS'the lady'\np3\nsVref_id\np4\nL5L\nsa.")
    assert read_plain_pickle(path) == [{"sent": "the lady", "ref_id": 5}]


class Bomb:
    def __reduce__(self):
        return (os.system, ("echo run > pwned",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_asks_for_code_is_refused_unread(coco, protocol, capsys, monkeypatch):
    monkeypatch.chdir(coco)
    path = coco / "refcoco/refs(unc).p"
    path.write_bytes(pickle.dumps([{"ref_id": 1, "x": Bomb()}], protocol=protocol))
    assert convert(coco) == 2
    assert not (coco / "pwned").exists()
    error = capsys.readouterr().err
    assert "refs(unc).p" in error and "system" in error and "plain containers only" in error


@pytest.mark.parametrize("payload", [set, frozenset, complex])
def test_only_plain_containers_are_admitted(coco, payload):
    # Even harmless classes are not asked for by these files.
    path = coco / "x.p"
    path.write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(DataError, match="the pickle asks for"):
        read_plain_pickle(path)


def test_persistent_objects_are_refused(coco):
    path = coco / "x.p"
    path.write_bytes(b"Psecret\n.")
    with pytest.raises(DataError, match="outside itself"):
        read_plain_pickle(path)


def test_a_half_downloaded_pickle_is_named(coco, capsys):
    path = coco / "refcoco/refs(unc).p"
    path.write_bytes(path.read_bytes()[:200])
    assert convert(coco) == 2
    assert "refs(unc).p is damaged or only half downloaded" in capsys.readouterr().err


def test_missing_instances_are_named(coco, capsys):
    (coco / "refcoco/instances.json").unlink()
    assert convert(coco) == 2
    assert "missing: " in (error := capsys.readouterr().err) and "instances.json" in error


def test_instances_of_another_data_set_are_named(coco, capsys):
    path = coco / "refcoco/instances.json"
    instances = json.loads(path.read_text())
    instances["annotations"] = instances["annotations"][:2]
    path.write_text(json.dumps(instances))
    assert convert(coco) == 2
    assert "lacks the annotation or image of 3 of 5 refs (ref_id 2, 3, 4)" in capsys.readouterr().err


def test_missing_and_corrupt_images_are_named_and_nothing_is_written(coco, capsys):
    first, second = sorted((coco / "train2014").iterdir())
    first.unlink()
    second.write_bytes(second.read_bytes()[:300])
    assert convert(coco) == 2
    error = capsys.readouterr().err
    assert f"1 images missing: {first}" in error
    assert f"1 images that cannot be opened: {second}" in error
    assert list((coco / "out").iterdir()) == []


@pytest.mark.parametrize("bbox", [[90, 20, 30, 40], [-5, 0, 10, 10], [10, 10, 0, 5], [10, 10, 5, 100]])
def test_boxes_outside_their_image_are_named(coco, capsys, bbox):
    path = coco / "refcoco/instances.json"
    instances = json.loads(path.read_text())
    instances["annotations"][3]["bbox"] = bbox
    path.write_text(json.dumps(instances))
    assert convert(coco) == 2
    error = capsys.readouterr().err
    assert "2 boxes that are empty or leave their image: testA-3-9" in error


def test_boxes_that_touch_the_edge_by_rounding_are_cut(coco):
    path = coco / "refcoco/instances.json"
    instances = json.loads(path.read_text())
    instances["annotations"][3]["bbox"] = [-0.01, 0, 100.02, 80.3]
    path.write_text(json.dumps(instances))
    assert convert(coco) == 0
    assert lines(coco / "out/testA.jsonl")[0]["bbox_xyxy"] == [0, 0, 100, 80]


def test_images_of_another_size_are_named(coco, capsys):
    Image.new("RGB", (50, 80)).save(min((coco / "train2014").iterdir()))
    assert convert(coco) == 2
    assert "1 images of another size than the annotations say" in capsys.readouterr().err


def test_a_failed_run_leaves_the_earlier_files_as_they_were(coco):
    assert convert(coco) == 0
    before = {path.name: path.read_bytes() for path in (coco / "out").iterdir()}
    min((coco / "train2014").iterdir()).unlink()
    assert convert(coco) == 2
    assert {path.name: path.read_bytes() for path in (coco / "out").iterdir()} == before


def test_an_interrupted_run_leaves_no_file(coco):
    from data_scripts.refcoco import Row

    def rows():
        image = min((coco / "train2014").iterdir())
        yield Row("a", "val", image, "x", (1, 2, 3, 4))
        assert (coco / "out/val.jsonl.part").exists() and not (coco / "out/val.jsonl").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_splits(rows(), coco / "out")
    assert list((coco / "out").iterdir()) == []


def test_the_outlines_of_instances_are_not_held_in_memory(coco):
    path = coco / "refcoco/instances.json"
    instances = json.loads(path.read_text())
    outline = [[float(side) + 0.5 for side in range(200)]]
    instances["annotations"] += [
        {"id": number, "image_id": 581857, "bbox": [1.5, 2.5, 3.5, 4.5], "segmentation": outline}
        for number in range(2000)
    ]
    path.write_text(json.dumps(instances))
    assert convert(coco, split="val") == 0  # what is imported on first use
    tracemalloc.start()
    assert convert(coco, split="val") == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6  # 2,000 outlines of 200 numbers, 10 MB as lists


def test_limit_and_split_choose_rows(coco, capsys):
    assert convert(coco, split="train", limit=3) == 0
    assert [path.name for path in (coco / "out").iterdir()] == ["train.jsonl"]
    assert len(lines(coco / "out/train.jsonl")) == 3
    assert "train: 3 expressions (official 120,624, limit=3)" in capsys.readouterr().out
    assert convert(coco, split="train") == 0
    assert capsys.readouterr().out == "train: 4 expressions (official 120,624, DIFFERS)\n"  # no other was asked for


def vlm_r1_file(coco, **changes):
    record = {
        "image": "train2014/COCO_train2014_000000581857.jpg",
        "problem": "Please provide the bounding box coordinate of the region this sentence describes: the blue bowl.",
        "solution": [10, 20, 61, 81],
        "normalized_solution": [100, 250, 610, 1012],
        "height": 80,
        "width": 100,
        "bbox_list": [[10, 20, 61, 81]],
    }
    path = coco / "refcoco_val.json"
    path.write_text(json.dumps([record, record | {"problem": "left man", "solution": [0, 0, 101, 81]} | changes]))
    return path


def test_vlm_r1_arrays_lose_the_pixel_they_add(coco, capsys):
    path = vlm_r1_file(coco)
    assert convert(coco, annotations=path, images=coco, split="val") == 0
    first, second = lines(coco / "out/val.jsonl")
    assert first["expression"] == "the blue bowl" and first["bbox_xyxy"] == [10, 20, 60, 80]
    assert second["expression"] == "left man" and second["bbox_xyxy"] == [0, 0, 100, 80]
    assert "val: 2 expressions (official 10,834, DIFFERS)" in capsys.readouterr().out
    check_task(RefCOCO(data=str(coco / "out"), protocol="vlm-r1"), "val")


def vlm_r1_lines(coco, *answers, **changes):
    question = "<image>Please provide the bounding box coordinate of the region this sentence describes: the blue bowl."
    path = coco / "refcoco_train.jsonl"
    with path.open("w") as file:
        for number, answer in enumerate(answers):
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            row = {"id": number, "image": "train2014/COCO_train2014_000000581857.jpg", "conversations": turns} | changes
            file.write(json.dumps(row) + "\n")
    return path


def test_vlm_r1s_training_lines_give_the_rows_of_its_arrays(coco, capsys):
    path = vlm_r1_lines(coco, [10, 20, 61, 81], "[10, 20, 61, 81]", '{"bbox_2d": [10.0, 20, 61, 81]}')
    assert convert(coco, annotations=path, images=coco, split="train") == 0
    rows = lines(coco / "out/train.jsonl")
    assert [(row["expression"], row["bbox_xyxy"]) for row in rows] == [("the blue bowl", [10, 20, 60, 80])] * 3
    assert [row["id"] for row in rows] == ["train-0", "train-1", "train-2"]
    assert "train: 3 expressions (official 120,624, DIFFERS)" in capsys.readouterr().out
    check_task(RefCOCO(data=str(coco / "out")), "train")


@pytest.mark.parametrize(
    ("answer", "changes"),
    [
        ("[10, 20, 61]", {}),
        ("2 boxes: [10, 20, 61, 81]", {}),
        ([10, 20, 61, True], {}),
        (None, {}),
        ([10, 20, 61, 81], {"conversations": [{"from": "human", "value": "where?"}]}),
        (
            [10, 20, 61, 81],
            {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": [1, 2, 3, 4]}]},
        ),
        ([10, 20, 61, 81], {"conversations": "x"}),
        ([10, 20, 61, 81], {"image": ["a.jpg"]}),
    ],
)
def test_wrong_vlm_r1_lines_are_named(coco, capsys, answer, changes):
    path = vlm_r1_lines(coco, answer, **changes)
    assert convert(coco, annotations=path, images=coco, split="train") == 2
    assert "refcoco_train.jsonl: record 0 is not in VLM-R1's form" in capsys.readouterr().err


def test_four_numbers_are_not_taken_from_names_or_parts_of_numbers():
    assert four_numbers("(-1, 2.5), (30, 40)") == (-1, 2.5, 30, 40)
    for text in ("box2 3, 4, 5", "1e3, 2, 3, 4", "1, 2, 3, 4, 5", ""):
        with pytest.raises(ValueError, match="to unpack"):
            four_numbers(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solution": [1, 2, 3]}, "record 1 is not in VLM-R1's form"),
        ({"solution": "a box"}, "record 1 is not in VLM-R1's form"),
        ({"image": "train2014/none.jpg"}, "1 images missing"),
        ({"width": 101}, "another size"),
    ],
)
def test_wrong_vlm_r1_records_are_named(coco, capsys, changes, message):
    assert convert(coco, annotations=vlm_r1_file(coco, **changes), images=coco, split="val") == 2
    assert message in capsys.readouterr().err


def lmms_rows(coco, split="testA"):
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
            "question_id": str(index),
            "image": Image.new("RGB", SIZE, (index, 0, 0)),
            "question": "describe",
            "answer": ["left", "the left one"],
            "segmentation": [1.0],
            "bbox": [10.25, 20.5, 30.0, 40.0],
            "iscrowd": 0,
            "file_name": f"{index}.jpg",
        }
        for index in range(2)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def saved_lmms(coco, form):
    import datasets

    rows = lmms_rows(coco)
    if form == "parquet":
        rows.to_parquet(coco / "testA.parquet")
        return coco / "testA.parquet"
    (datasets.DatasetDict({"testA": rows}) if form == "dict" else rows).save_to_disk(coco / "RefCOCO")
    return coco / "RefCOCO"


@pytest.mark.parametrize("form", ["disk", "dict", "parquet"])
def test_lmms_rows_become_lines_and_images(coco, form, capsys):
    source = saved_lmms(coco, form)
    assert convert(coco, annotations=source, images=None, split="testA", dataset="refcoco") == 0
    rows = lines(coco / "out/testA.jsonl")
    assert [(row["id"], row["expression"], row["image"]) for row in rows] == [
        ("testA-0-0-0", "left", "images/testA-000000.png"),
        ("testA-0-0-1", "the left one", "images/testA-000000.png"),
        ("testA-1-1-0", "left", "images/testA-000001.png"),
        ("testA-1-1-1", "the left one", "images/testA-000001.png"),
    ]
    assert rows[0]["bbox_xyxy"] == [10.25, 20.5, 40.25, 60.5]
    assert "testA: 4 expressions (official 5,657, DIFFERS)" in capsys.readouterr().out
    check_task(RefCOCO(data=str(coco / "out")), "testA")


def test_lmms_splits_that_are_no_standard_ones_are_named(coco, capsys):
    lmms_rows(coco).to_parquet(coco / "val.parquet")
    for dataset, split, said in (
        ("refcoco", "val", "val holds unc's 3,811 rows and google's 5,000: no standard split;"),
        ("refcoco", "test", "test holds google's 5,000 rows: no standard split;"),
        ("refcocog", "val", "val holds umd's 2,573 rows and google's 5,000: no standard split;"),
        ("refcoco", "testA", ""),
        ("refcoco+", "val", ""),
        ("refcocog", "test", ""),
    ):
        assert convert(coco, annotations=coco / "val.parquet", images=None, split=split, dataset=dataset) == 0
        printed = capsys.readouterr().out
        assert said in printed and ("no standard" in printed) == bool(said)
        assert said in RefCOCO(data="hub", dataset=dataset).metric_note
    assert "no standard" not in RefCOCO(data="hub", dataset="refcoco+").metric_note


def test_a_split_that_lmms_lacks_is_named(coco, capsys):
    assert convert(coco, annotations=saved_lmms(coco, "dict"), images=None, split="train") == 2
    assert "has no split 'train'; it has testA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": None}, "out=… is missing"),
        ({"annotations": None}, "annotations=… is missing"),
        ({"images": "nowhere"}, "images is 'nowhere'"),
        ({"limit": "some"}, "limit is 'some'"),
        ({"split": "testC"}, "split is 'testC'; accepted: train, val, testA, testB"),
        ({"dataset": "coco"}, "dataset is 'coco'"),
        ({"colour": "red"}, "unknown argument 'colour=red'"),
        ({"annotations": "none.json", "split": "val"}, "missing: none.json"),
        ({"annotations": "none.json"}, "split=… is missing"),
    ],
)
def test_wrong_options_are_named(coco, capsys, options, message):
    assert convert(coco, **options) == 2
    assert message in capsys.readouterr().err


def test_equal_ids_are_named(coco, capsys):
    path = coco / "refcoco/refs(unc).p"
    refs = read_plain_pickle(path)
    path.write_bytes(pickle.dumps([*refs, refs[0]], protocol=2))
    assert convert(coco) == 2
    assert "2 ids that stand twice: train-0-0, train-0-1" in capsys.readouterr().err


def test_the_report_names_official_counts_and_what_lacks():
    counts = {"train": 120624, "val": 10834, "testA": 5657}
    assert report(counts, "refcoco", None) == [
        "train: 120,624 expressions (official 120,624)",
        "val: 10,834 expressions (official 10,834)",
        "testA: 5,657 expressions (official 5,657)",
        "testB: not in the source",
    ]
    assert report({"val": 3}, None, None) == ["val: 3 expressions (no official count known)"]


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("data/refcoco/refs(unc).p", "refcoco"),
        ("data/refcoco+/refs(unc).p", "refcoco+"),
        ("lmms-lab/RefCOCOplus", "refcoco+"),
        ("rec_jsons/refcocop_val.json", "refcoco+"),
        ("rec_jsons/refcocog_val.json", "refcocog"),
        ("data/refcoco/refcocog_val.json", "refcocog"),
        ("rec_jsons/refcoco_val.json", "refcoco"),
        ("mine.json", None),
    ],
)
def test_the_data_set_is_told_from_the_path(source, dataset):
    assert dataset_of(source) == dataset


def test_the_expression_is_told_from_the_problem():
    assert expression_of("<image>\nFind the region this sentence describes: a: b") == "a: b"
    assert expression_of("a man") == "a man"
    assert expression_of("a man in st. paul.") == "a man in st. paul."  # its own full stop, not the template's
    template = "Please provide the bounding box coordinate of the region this sentence describes: "
    assert expression_of(f"{template}the lady.") == expression_of(f"{template}the lady") == "the lady"
    assert expression_of(f"{template}the lady..", "the lady.") == "the lady."
    assert expression_of(f"{template}the lady.", "the lady.") == "the lady."
