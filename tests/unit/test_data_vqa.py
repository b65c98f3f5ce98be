"""The published forms of the data sets of visual question answering, in small files of exactly their shape."""

import base64
import csv
import importlib
import io
import json
import sqlite3
import zipfile

import pytest
from PIL import Image

from data_scripts import gqa
from data_scripts._vqa import join, texts_of
from data_scripts.writing import DataError
from vlm_grpo.task import check_task, find_task


def jpeg(index=0):
    file = io.BytesIO()
    Image.new("RGB", (32, 24), (index, 90, 30)).save(file, "JPEG")
    return file.getvalue()


def png(index=0):
    file = io.BytesIO()
    Image.new("RGB", (24, 20), (index, 90, 30)).save(file, "PNG")
    return file.getvalue()


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content if isinstance(content, bytes) else json.dumps(content))
    return path


def run(name, folder, **options):
    module = importlib.import_module(f"data_scripts.{name}")
    return module.main([f"out={folder / 'out'}", *(f"{key}={value}" for key, value in options.items())])


def lines(folder, split):
    return [json.loads(line) for line in (folder / f"out/{split}.jsonl").read_text().splitlines()]


def check(name, folder, split):
    adapter = find_task(name, {"data": str(folder / "out")})
    check_task(adapter, split)
    return adapter


def tsv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


def encoded(index=0):
    return base64.b64encode(png(index)).decode()


def to_parquet(path, rows, features):
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(path)
    return path


def text():
    import datasets

    return datasets.Value("string")


def number():
    import datasets

    return datasets.Value("int64")


def image():
    import datasets

    return datasets.Image()


# ---- VQAv2 and OK-VQA ----

PEOPLE = ["net", "net", "net", "netting", "net", "net", "mesh", "net", "net", "net"]


def vqa_question(question_id, image_id):
    return {"image_id": image_id, "question": f"What is this {question_id}?", "question_id": question_id}


def vqa_annotation(question_id, image_id, raw=False):
    answers = [
        {"answer": answer, "answer_confidence": "maybe", "answer_id": at + 1} | ({"raw_answer": answer} if raw else {})
        for at, answer in enumerate(PEOPLE)
    ]
    return {
        "question_type": "four" if raw else "what is this",
        "multiple_choice_answer": "net",
        "answers": answers,
        "image_id": image_id,
        "answer_type": "other",
        "question_id": question_id,
    }


KEYS = [(262148000, 262148), (262148001, 262148), (393225000, 393225)]


@pytest.fixture
def coco(tmp_path):
    """COCO's val2014 with two images, and the files of both challenges, as zips and plain."""
    for image_id in (262148, 393225):
        put(tmp_path / f"val2014/COCO_val2014_{image_id:012d}.jpg", jpeg(image_id % 250))
    top = {"info": {"version": "2.0"}, "task_type": "Open-Ended", "data_type": "mscoco", "license": {}}
    questions = top | {"data_subtype": "val2014", "questions": [vqa_question(*key) for key in KEYS]}
    annotations = {"info": {}, "license": {}, "data_subtype": "val2014", "data_type": "mscoco"}
    v2 = annotations | {"annotations": [vqa_annotation(*key) for key in KEYS]}
    zipped(tmp_path / "v2_Questions_Val_mscoco.zip", {"v2_OpenEnded_mscoco_val2014_questions.json": questions})
    zipped(tmp_path / "v2_Annotations_Val_mscoco.zip", {"v2_mscoco_val2014_annotations.json": v2})
    put(tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json", questions)
    put(tmp_path / "v2_mscoco_val2014_annotations.json", v2)
    ok = annotations | {"annotations": [vqa_annotation(*key, raw=True) | {"confidence": 3} for key in KEYS]}
    ok |= {"question_types": {"four": "Sports and Recreation"}}
    zipped(tmp_path / "OpenEnded_val.zip", {"OpenEnded_mscoco_val2014_questions.json": questions})
    zipped(tmp_path / "mscoco_val.zip", {"mscoco_val2014_annotations.json": ok})
    test = top | {"data_subtype": "test2015", "questions": [vqa_question(1000, 1)]}
    dev = top | {"data_subtype": "test-dev2015", "questions": [vqa_question(1001, 1)]}
    zipped(
        tmp_path / "v2_Questions_Test_mscoco.zip",
        {
            "v2_OpenEnded_mscoco_test2015_questions.json": test,
            "v2_OpenEnded_mscoco_test-dev2015_questions.json": dev,
        },
    )
    put(tmp_path / "test2015/COCO_test2015_000000000001.jpg", jpeg(3))
    return tmp_path


def vqav2(coco, **options):
    given = {
        "split": "val",
        "questions": coco / "v2_Questions_Val_mscoco.zip",
        "annotations": coco / "v2_Annotations_Val_mscoco.zip",
        "images": coco / "val2014",
    }
    return run("vqav2", coco, **{key: value for key, value in (given | options).items() if value is not None})


def test_vqav2_is_read_from_its_zips(coco, capsys):
    assert vqav2(coco) == 0
    rows = lines(coco, "val")
    assert len(rows) == 3 and rows[1] == {
        "id": "262148001",
        "image": "../val2014/COCO_val2014_000000262148.jpg",
        "question": "What is this 262148001?",
        "answers": PEOPLE,
        "question_id": 262148001,
        "groups": ["answer_type/other", "question_type/what is this"],
    }
    assert capsys.readouterr().out == "val: 3 questions (official 214,354, DIFFERS)\n"
    adapter = check("vqav2", coco, "val")
    files = adapter.official_files(adapter.samples("val")[:1], ["net"])
    assert json.loads(files["vqa_results.json"]) == [{"question_id": 262148000, "answer": "net"}]


def test_vqav2_is_read_from_plain_files_and_zipped_images(coco):
    members = {f"val2014/{path.name}": path.read_bytes() for path in (coco / "val2014").iterdir()}
    images = zipped(coco / "val2014.zip", members)
    plain = {
        "questions": coco / "v2_OpenEnded_mscoco_val2014_questions.json",
        "annotations": coco / "v2_mscoco_val2014_annotations.json",
    }
    assert vqav2(coco, **plain, images=images) == 0
    rows = lines(coco, "val")
    assert rows[0]["image"] == rows[1]["image"] == "images/COCO_val2014_000000262148.jpg"
    assert (coco / "out" / rows[2]["image"]).read_bytes() == jpeg(393225 % 250)
    assert len(list((coco / "out/images").iterdir())) == len({image_id for _, image_id, *_ in KEYS}) < len(KEYS)
    check("vqav2", coco, "val")


def test_vqav2_has_questions_whose_answers_are_not_public(coco, capsys):
    for split, question_id in (("test", 1000), ("test-dev", 1001)):
        source = coco / "v2_Questions_Test_mscoco.zip"
        assert vqav2(coco, split=split, questions=source, annotations=None, images=coco / "test2015") == 0
        (row,) = lines(coco, split)
        assert row["question_id"] == question_id and row["answers"] == [] and row["groups"] == []
        assert row["image"] == "../test2015/COCO_test2015_000000000001.jpg"
    assert "test-dev: 1 questions (official 107,394, DIFFERS)" in capsys.readouterr().out
    assert vqav2(coco, annotations=None) == 2
    assert "annotations=… is missing: only test-dev, test has questions alone" in capsys.readouterr().err


def test_annotations_may_stand_in_another_order(coco):
    path = coco / "v2_mscoco_val2014_annotations.json"
    annotations = json.loads(path.read_text())
    annotations["annotations"].reverse()
    path.write_text(json.dumps(annotations))
    assert vqav2(coco, annotations=path) == 0
    assert sorted(row["id"] for row in lines(coco, "val")) == ["262148000", "262148001", "393225000"]
    check("vqav2", coco, "val")


def test_annotations_of_another_split_are_named(coco, capsys):
    path = coco / "v2_mscoco_val2014_annotations.json"
    annotations = json.loads(path.read_text())
    annotations["annotations"][0]["question_id"] = 7
    path.write_text(json.dumps(annotations))
    assert vqav2(coco, annotations=path) == 2
    assert "1 questions have no annotation (262148000), 1 annotations no question (7)" in capsys.readouterr().err
    assert not list((coco / "out").glob("*.jsonl"))


def test_pairs_are_found_with_little_held():
    ids = list(range(100))
    questions = ({"question_id": at} for at in ids)
    annotations = ({"question_id": at} for at in [*ids[1::2], *ids[::2]])
    assert sorted(one["question_id"] for one, other in join(questions, annotations, "x") if one == other) == ids
    in_order = join(iter([{"question_id": 1}, {"question_id": 2}]), iter([{"question_id": 1}]), "x")
    assert next(in_order)[0] == {"question_id": 1}  # given before the rest is read
    with pytest.raises(DataError, match=r"1 questions have no annotation \(2\), 0 annotations no question \(none\)"):
        list(in_order)


def test_missing_images_and_wrong_records_are_named(coco, capsys):
    (coco / "val2014/COCO_val2014_000000393225.jpg").unlink()
    assert vqav2(coco) == 2
    assert "1 images missing: " in (error := capsys.readouterr().err) and "000000393225.jpg" in error
    assert vqav2(coco, limit=2) == 0
    assert "val: 2 questions (official 214,354, limit=2)" in capsys.readouterr().out
    path = coco / "v2_OpenEnded_mscoco_val2014_questions.json"
    broken = json.loads(path.read_text())
    del broken["questions"][1]["question"]
    path.write_text(json.dumps(broken))
    assert vqav2(coco, questions=path) == 2
    assert "record 1 is not in the form of the VQA challenge: KeyError('question')" in capsys.readouterr().err
    broken["questions"][1]["question"] = None
    path.write_text(json.dumps(broken))
    assert vqav2(coco, questions=path, limit=2) == 2
    assert "1 questions that are no text, or have an answer that is none: " in capsys.readouterr().err
    for wrong in (3, {}, {"question_id": [1]}):
        path.write_text(json.dumps({"questions": [wrong]}))
        assert vqav2(coco, questions=path) == 2
        assert "not in the form of the VQA challenge: its question_id is missing" in capsys.readouterr().err


def vqav2_rows(coco):
    return [
        {key: value for key, value in vqa_annotation(*ids).items()}
        | vqa_question(*ids)
        | {"image": {"bytes": jpeg(ids[1] % 250), "path": "x.jpg"}}
        for ids in KEYS
    ]


def vqav2_features():
    people = [{"answer": text(), "answer_confidence": text(), "answer_id": number()}]
    return {
        "question_type": text(),
        "multiple_choice_answer": text(),
        "answers": people,
        "image_id": number(),
        "answer_type": text(),
        "question_id": number(),
        "question": text(),
        "image": image(),
    }


def test_vqav2_is_read_from_the_hubs_rows(coco):
    to_parquet(coco / "hub/data/validation-00000-of-00001.parquet", vqav2_rows(coco), vqav2_features())
    assert run("vqav2", coco, split="val", source=coco / "hub") == 0
    rows = lines(coco, "val")
    assert rows[0]["answers"] == PEOPLE and rows[0]["groups"] == ["answer_type/other", "question_type/what is this"]
    assert (coco / "out" / rows[2]["image"]).read_bytes() == jpeg(393225 % 250)
    assert len(list((coco / "out/images").iterdir())) == len({image_id for _, image_id, *_ in KEYS}) < len(KEYS)
    check("vqav2", coco, "val")


@pytest.mark.parametrize(
    ("name", "split", "source", "theirs"),
    [
        ("vqav2", "val", "lmms-lab/VQAv2", "validation"),
        ("vqav2", "test-dev", "lmms-lab/VQAv2", "testdev"),
        ("okvqa", "val", "lmms-lab/OK-VQA", "val2014"),
        ("textvqa", "val", "lmms-lab/textvqa", "validation"),
        ("docvqa", "val", "lmms-lab/DocVQA", "validation"),
        ("chartqa", "val", "HuggingFaceM4/ChartQA", "val"),
        ("ocrvqa", "val", "howard-hou/OCR-VQA", "validation"),
    ],
)
def test_splits_are_called_as_the_hub_calls_them(monkeypatch, tmp_path, capsys, name, split, source, theirs):
    import datasets

    asked = []

    def load(*args, split, streaming):
        asked.append(split)
        raise ValueError("no more is needed here")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert run(name, tmp_path, split=split, source=source) == 2
    assert asked == [theirs], capsys.readouterr().err


def test_tasks_read_the_hubs_rows_themselves(coco, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list(vqav2_rows(coco), features=datasets.Features(vqav2_features()))
    asked = []

    def load(*args, split):
        asked.append((*args, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    adapter = find_task("vqav2", {"data": "hub", "limit": 2})
    check_task(adapter, "val")
    samples = adapter.samples("val")
    assert asked[-1] == ("lmms-lab/VQAv2", "validation")
    assert [one.id for one in samples] == ["262148000", "262148001"]
    assert samples[0].target.groups == ("answer_type/other", "question_type/what is this")
    assert samples[0].images[0].size == (32, 24)
    assert "lmms-lab/VQAv2" in adapter.metric_note
    adapter.samples("test-dev")
    assert asked[-1] == ("lmms-lab/VQAv2", "testdev")


def test_okvqa_is_read_from_its_zips_and_the_hub(coco, capsys):
    official = {
        "questions": coco / "OpenEnded_val.zip",
        "annotations": coco / "mscoco_val.zip",
        "images": coco / "val2014",
    }
    assert run("okvqa", coco, split="val", **official) == 0
    assert "val: 3 questions (official 5,046, DIFFERS)" in capsys.readouterr().out
    row = lines(coco, "val")[2]
    assert row["answers"] == PEOPLE and row["groups"] == ["answer_type/other", "question_type/four"]
    check("okvqa", coco, "val")
    rows = [{"answers": PEOPLE, "question_type": "four", "answer_type": "other"} for _ in KEYS]
    rows = [
        row | {"question_id": str(key), "image": {"bytes": jpeg(), "path": None}, "question": "Which sport?"}
        for row, (key, _) in zip(rows, KEYS, strict=True)
    ]
    import datasets

    features = {"question_id": text(), "image": image(), "question": text(), "answers": datasets.Sequence(text())}
    features |= {"question_type": text(), "answer_type": text()}
    to_parquet(coco / "ok/data/val2014-00000-of-00001.parquet", rows, features)
    assert run("okvqa", coco, split="val", source=coco / "ok") == 0
    assert lines(coco, "val")[0]["answers"] == PEOPLE
    adapter = check("okvqa", coco, "val")
    # The official evaluation compares with its own numbers
    files = adapter.official_files(adapter.samples("val")[:1], ["race"])
    assert json.loads(files["vqa_results.json"]) == [{"question_id": KEYS[0][0], "answer": "race"}]


# ---- TextVQA ----


def textvqa_record(index, split="val"):
    record = {
        "question": "what is the brand of this camera?",
        "image_id": f"003a8ae2ef43b90{index}",
        "image_classes": ["Cassette deck"],
        "flickr_original_url": "https://farm2.staticflickr.com/4/5_o.jpg",
        "flickr_300k_url": "https://c4.staticflickr.com/4/5_z.jpg",
        "image_width": 1024,
        "image_height": 664,
        "question_tokens": ["what", "is"],
        "question_id": 34602 + index,
        "set_name": split,
    }
    return record | ({} if split == "test" else {"answers": ["nous les gosses", *["dakota"] * 9]})


def test_textvqa_is_read_from_its_json(tmp_path, capsys):
    top = {"dataset_type": "val", "dataset_name": "textvqa", "dataset_version": "0.5.1"}
    path = put(tmp_path / "TextVQA_0.5.1_val.json", top | {"data": [textvqa_record(index) for index in range(2)]})
    for index in range(2):
        put(tmp_path / f"train_images/003a8ae2ef43b90{index}.jpg", jpeg(index))
    assert run("textvqa", tmp_path, split="val", questions=path, images=tmp_path / "train_images") == 0
    assert "val: 2 questions (official 5,000, DIFFERS)" in capsys.readouterr().out
    row = lines(tmp_path, "val")[1]
    assert row["id"] == "34603" and row["image"] == "../train_images/003a8ae2ef43b901.jpg"
    assert row["answers"] == ["nous les gosses", *["dakota"] * 9]
    check("textvqa", tmp_path, "val")
    assert run("textvqa", tmp_path, split="train", questions=path, images=tmp_path / "train_images") == 2
    assert "record 0 is of the split 'val', not 'train'" in capsys.readouterr().err


def test_textvqa_is_read_from_the_hub_and_from_a_table(tmp_path):
    import datasets

    rows = [
        {key: value for key, value in textvqa_record(index).items() if key in ("question", "question_id", "answers")}
        | {"image": {"bytes": jpeg(index), "path": None}}
        for index in range(2)
    ]
    features = {"image": image(), "question": text(), "question_id": number(), "answers": datasets.Sequence(text())}
    to_parquet(tmp_path / "validation-00000-of-00001.parquet", rows, features)
    assert run("textvqa", tmp_path, split="val", source=tmp_path / "validation-00000-of-00001.parquet") == 0
    assert lines(tmp_path, "val")[0]["answers"][1] == "dakota"
    check("textvqa", tmp_path, "val")
    (tmp_path / "out/val.jsonl").unlink()
    table = [{"index": "0", "image": encoded(), "question": "what brand?", "answer": str(["a b", *["c"] * 9])}]
    assert run("textvqa", tmp_path, split="val", source=tsv(tmp_path / "TextVQA_VAL.tsv", table)) == 0
    assert lines(tmp_path, "val")[0]["answers"] == ["a b", *["c"] * 9]
    check("textvqa", tmp_path, "val")


# ---- GQA ----


def gqa_entry(index):
    return {
        "semantic": [{"operation": "select", "dependencies": [], "argument": "bed (0)"}],
        "entailed": [],
        "equivalent": ["05515938"],
        "question": "Is the bed blue?",
        "imageId": f"240572{index}",
        "isBalanced": True,
        "groups": {"global": None, "local": "06-bed_color"},
        "answer": "no",
        "semanticStr": "select: bed (0)->verify color: blue [0]",
        "annotations": {"answer": {}, "question": {"2": "1"}, "fullAnswer": {}},
        "types": {"detailed": "verifyAttrC", "semantic": "attr", "structural": "verify"},
        "fullAnswer": "No, the bed is white.",
    }


@pytest.mark.parametrize("form", ["zip", "json"])
def test_gqa_is_read_from_its_files(tmp_path, capsys, form):
    entries = {f"0551593{index}": gqa_entry(index) for index in range(2)}
    if form == "zip":
        path = zipped(
            tmp_path / "questions1.2.zip",
            {"val_balanced_questions.json": entries, "testdev_balanced_questions.json": {}, "readme.txt": b"x"},
        )
    else:
        path = put(tmp_path / "val_balanced_questions.json", entries)
    for index in range(2):
        put(tmp_path / f"images/240572{index}.jpg", jpeg(index))
    assert run("gqa", tmp_path, split="val", questions=path, images=tmp_path / "images") == 0
    assert "val: 2 questions (official 132,062, DIFFERS)" in capsys.readouterr().out
    row = lines(tmp_path, "val")[1]
    assert (row["id"], row["question_id"], row["answers"]) == ("05515931", "05515931", ["no"])
    assert row["image"] == "../images/2405721.jpg" and row["groups"] == ["structural/verify", "semantic/attr"]
    adapter = check("gqa", tmp_path, "val")
    files = adapter.official_files(adapter.samples("val")[:1], ["No"])
    assert json.loads(files["gqa_predictions.json"]) == [{"questionId": "05515930", "prediction": "no"}]
    if form == "json":
        assert run("gqa", tmp_path, split="train", questions=path, images=tmp_path / "images") == 2
        assert "is not train_balanced_questions.json" in capsys.readouterr().err


def test_gqa_is_read_from_the_hubs_two_configurations(tmp_path, capsys, monkeypatch):
    types = {"structural": text(), "semantic": text(), "detailed": text()}
    features = {"id": text(), "imageId": text(), "question": text(), "answer": text(), "types": types}
    entries = [gqa_entry(index % 2) for index in range(3)]
    rows = [
        {"id": f"20{index}"} | {key: entry[key] for key in ("imageId", "question", "answer", "types")}
        for index, entry in enumerate(entries)
    ]
    images = [{"id": f"240572{index}", "image": {"bytes": jpeg(index), "path": None}} for index in range(2)]
    hub = tmp_path / "GQA"
    to_parquet(hub / "testdev_balanced_instructions/testdev-00000-of-00001.parquet", rows, features)
    to_parquet(hub / "testdev_balanced_images/testdev-00000-of-00001.parquet", images, {"id": text(), "image": image()})
    writers = []
    real = gqa.SplitWriter
    monkeypatch.setattr(gqa, "SplitWriter", lambda out: writers.append(real(out)) or writers[-1])
    assert run("gqa", tmp_path, split="testdev", source=hub) == 0
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        writers[0].take("testdev", "0")
    assert [row["image"] for row in lines(tmp_path, "testdev")] == [
        "images/2405720.jpg",
        "images/2405721.jpg",
        "images/2405720.jpg",
    ]
    check("gqa", tmp_path, "testdev")
    first = tmp_path / "first"
    assert run("gqa", first, split="testdev", source=hub, limit=1) == 0
    assert len(lines(first, "testdev")) == 1
    assert [path.name for path in (first / "out/images").iterdir()] == ["2405720.jpg"]
    to_parquet(hub / "testdev_balanced_images/testdev-00000-of-00001.parquet", [{"id": "1"}], {"id": text()})
    assert run("gqa", tmp_path, split="testdev", source=hub) == 2
    assert "image 0 has no id or image; it has id" in capsys.readouterr().err


# ---- OCR-VQA ----


def ocrvqa_entry(index, split):
    return {
        "imageURL": f"http://ecx.images-amazon.com/images/I/51l6XIoa3r{index}.{'gif' if index == 1 else 'jpg'}",
        "title": "Mom's Family Wall Calendar 2016",
        "authorName": "Sandra Boynton",
        "genre": "Calendars",
        "questions": ["Who wrote this book?", "Is this a comedy book?"],
        "answers": ["Sandra Boynton", "No"],
        "split": split,
    }


@pytest.fixture
def covers(tmp_path):
    entries = {f"076118321{index}": ocrvqa_entry(index, (1, 2, 3)[index % 3]) for index in range(4)}
    put(tmp_path / "dataset.json", entries)
    for index in range(4):
        file = io.BytesIO()
        Image.new("P", (9, 9), index).save(file, "GIF" if index == 1 else "PNG")
        put(tmp_path / f"images/076118321{index}.{'gif' if index == 1 else 'jpg'}", file.getvalue())
    return tmp_path


def test_ocrvqa_is_read_from_its_json(covers, capsys):
    assert run("ocrvqa", covers, questions=covers / "dataset.json", images=covers / "images") == 0
    assert capsys.readouterr().out.splitlines() == [
        "train: 4 questions (no official count known)",
        "val: 2 questions (no official count known)",
        "test: 2 questions (no official count known)",
        "all splits: 8 questions (official 1,002,146)",
    ]
    assert [row["id"] for row in lines(covers, "val")] == ["0761183211-0", "0761183211-1"]
    assert lines(covers, "val")[0] == {
        "id": "0761183211-0",
        "image": "../images/0761183211.gif",
        "question": "Who wrote this book?",
        "answers": ["Sandra Boynton"],
        "question_id": "0761183211-0",
        "groups": ["genre/Calendars"],
    }
    for split in ("train", "val", "test"):
        check("ocrvqa", covers, split)


def test_ocrvqa_may_leave_out_covers_that_are_gone(covers, capsys):
    (covers / "images/0761183213.jpg").unlink()
    options = {"questions": covers / "dataset.json", "images": covers / "images", "split": "train"}
    assert run("ocrvqa", covers, **options) == 2
    assert "1 images missing: " in capsys.readouterr().err
    assert run("ocrvqa", covers, **options, on_missing="skip") == 0
    out = capsys.readouterr().out
    assert "train: 2 questions left out, whose image or answer is missing" in out and "train: 2 questions (no" in out
    assert run("ocrvqa", covers, **options, on_missing="maybe") == 2
    assert "on_missing is 'maybe'; accepted: error, skip" in capsys.readouterr().err


def test_ocrvqa_is_read_from_the_hub(covers, capsys):
    import datasets

    rows = [
        {"image": {"bytes": jpeg(index), "path": None}, "image_id": f"07611832{index}", "set_name": "test"}
        | {"questions": ["Who?", "What?"], "answers": ["Boynton", "A calendar"], "genre": "Calendars"}
        for index in range(2)
    ]
    features = {"image": image(), "image_id": text(), "set_name": text(), "genre": text()}
    features |= {"questions": datasets.Sequence(text()), "answers": datasets.Sequence(text())}
    to_parquet(covers / "data/test-00000-of-00001.parquet", rows, features)
    assert run("ocrvqa", covers, split="test", source=covers / "data") == 0
    rows[1]["answers"] = ["Boynton", " "]
    to_parquet(covers / "less/test-00000-of-00001.parquet", rows, features)
    fewer = {"out": covers / "fewer", "split": "test", "source": covers / "less"}
    assert run("ocrvqa", covers, **fewer) == 2
    assert run("ocrvqa", covers, **fewer, on_missing="skip") == 0
    assert "test: 3 questions (" in capsys.readouterr().out
    assert [row["image"] for row in lines(covers, "test")] == ["images/076118320.jpg"] * 2 + [
        "images/076118321.jpg"
    ] * 2
    check("ocrvqa", covers, "test")


# ---- DocVQA ----


def docvqa_record(index, **more):
    return {
        "questionId": 49153 + index,
        "question": "What is the \N{LEFT SINGLE QUOTATION MARK}actual value per 1000?",
        "question_types": ["figure/diagram", "form"],
        "image": f"documents/pybv0228_8{index}.png",
        "docId": 14465,
        "ucsf_document_id": "pybv0228",
        "ucsf_document_page_no": "81",
        "answers": ["0.28", "0.280"],
        "data_split": "val",
        **more,
    }


@pytest.mark.parametrize("folder", ["spdocvqa_images", "documents"])
def test_docvqa_is_read_from_its_json(tmp_path, capsys, folder):
    top = {"dataset_name": "SP-DocVQA", "dataset_version": "1.0", "dataset_split": "val"}
    records = [docvqa_record(index) for index in range(2)]
    path = put(tmp_path / "val_v1.0_withQT.json", top | {"data": records})
    for index in range(2):
        put(tmp_path / f"{folder}/pybv0228_8{index}.png", png(index))
    images = tmp_path if folder == "documents" else tmp_path / folder
    assert run("docvqa", tmp_path, split="val", questions=path, images=images) == 0
    assert "val: 2 questions (official 5,349, DIFFERS)" in capsys.readouterr().out
    row = lines(tmp_path, "val")[0]
    assert row["question_id"] == 49153 and row["image"] == f"../{folder}/pybv0228_80.png"
    assert row["groups"] == ["question_type/figure/diagram", "question_type/form"]
    adapter = check("docvqa", tmp_path, "val")
    files = adapter.official_files(adapter.samples("val")[:1], ["0.28"])
    assert json.loads(files["docvqa_results.json"]) == [{"questionId": 49153, "answer": "0.28"}]


def test_docvqa_is_read_without_question_types_or_answers_and_from_the_hub(tmp_path, capsys):
    import datasets

    record = docvqa_record(0, data_split="test")
    del record["question_types"], record["answers"]
    path = put(tmp_path / "test_v1.0.json", {"dataset_split": "test", "data": [record]})
    put(tmp_path / "images/pybv0228_80.png", png())
    assert run("docvqa", tmp_path, split="test", questions=path, images=tmp_path / "images") == 0
    assert lines(tmp_path, "test")[0]["answers"] == []
    rows = [
        docvqa_record(index, questionId=str(49153 + index), image={"bytes": png(index), "path": None})
        for index in range(2)
    ]
    several = datasets.Sequence(text())
    features = {key: text() for key in rows[0]} | {"image": image(), "docId": number()}
    features |= {"question_types": several, "answers": several}
    clone = tmp_path / "lmms-lab-DocVQA"  # a clone holds another data set, too
    to_parquet(clone / "DocVQA/validation-00000-of-00001.parquet", rows, features)
    to_parquet(
        clone / "InfographicVQA/validation-00000-of-00001.parquet", [{"questionId": "1"}], {"questionId": text()}
    )
    for source in (clone / "DocVQA", clone):
        assert run("docvqa", tmp_path, split="val", source=source) == 0
        assert [row["question_id"] for row in lines(tmp_path, "val")] == [49153, 49154]
    assert lines(tmp_path, "val")[1]["question_id"] == 49154
    check("docvqa", tmp_path, "val")
    (tmp_path / "out/val.jsonl").unlink()
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs["split"]))
        return datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_iterable_dataset()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load)
        assert run("docvqa", tmp_path, split="val", source="lmms-lab/DocVQA", limit=1) == 0
    assert asked == [(("lmms-lab/DocVQA", "DocVQA"), "validation")]
    assert "val: 1 questions (official 5,349, limit=1)" in capsys.readouterr().out


# ---- ChartQA ----


def test_chartqa_is_read_from_its_folder(tmp_path, capsys):
    data = tmp_path / "ChartQA Dataset"
    for kind, label in (("human", "14"), ("augmented", "Female")):
        records = [{"imgname": f"{kind}{at}.png", "query": "How many?", "label": label} for at in range(2)]
        put(data / f"test/test_{kind}.json", records)
        for at in range(2):
            put(data / f"test/png/{kind}{at}.png", png(at))
    put(data / "test/tables/human0.csv", b"a,b")
    assert run("chartqa", tmp_path, split="test", data=data) == 0
    assert "test: 4 questions (official 2,500, DIFFERS)" in capsys.readouterr().out
    rows = lines(tmp_path, "test")
    assert [(row["id"], row["groups"], row["answers"]) for row in rows][1:3] == [
        ("test-human-1", ["human"], ["14"]),
        ("test-augmented-0", ["augmented"], ["Female"]),
    ]
    assert rows[0]["image"] == "../ChartQA Dataset/test/png/human0.png"
    check("chartqa", tmp_path, "test")
    assert run("chartqa", tmp_path, split="val", data=data) == 2
    assert "has no folder 'val'" in capsys.readouterr().err


def test_chartqa_is_read_from_both_copies_on_the_hub_and_from_a_table(tmp_path, capsys):
    import datasets

    stored = {"image": {"bytes": png(), "path": None}}
    lmms = [stored | {"type": f"{kind}_test", "question": "How?", "answer": "14"} for kind in ("human", "augmented")]
    features = {"image": image(), "type": text(), "question": text(), "answer": text()}
    to_parquet(tmp_path / "lmms/test-00000-of-00001.parquet", lmms, features)
    m4 = [stored | {"query": "How?", "label": ["14"], "human_or_machine": at} for at in range(2)]
    kinds = datasets.ClassLabel(names=["human", "machine"])
    features = {"image": image(), "query": text(), "label": datasets.Sequence(text()), "human_or_machine": kinds}
    to_parquet(tmp_path / "m4/test-00000-of-00001.parquet", m4, features)
    table = [
        {"index": str(at), "image": encoded(at), "question": "How?", "answer": "14", "split": f"test_{kind}"}
        for at, kind in enumerate(("human", "augmented"))
    ]
    for source in (tmp_path / "lmms", tmp_path / "m4", tsv(tmp_path / "ChartQA_TEST.tsv", table)):
        assert run("chartqa", tmp_path, split="test", source=source) == 0
        rows = lines(tmp_path, "test")
        assert [row["groups"] for row in rows] == [["human"], ["augmented"]]
        assert [row["answers"] for row in rows] == [["14"], ["14"]]
        check("chartqa", tmp_path, "test")
    to_parquet(tmp_path / "odd.parquet", [stored | {"type": "x", "question": "", "answer": ""}], features={
        "image": image(), "type": text(), "question": text(), "answer": text()
    })  # fmt: skip
    assert run("chartqa", tmp_path, split="test", source=tmp_path / "odd.parquet") == 2
    assert "record 0 is not in the form of the data set's rows: ValueError(\"the type 'x'" in capsys.readouterr().err


# ---- CLEVR ----


def clevr_question(index, function, answer):
    return {
        "image_index": index,
        "program": [
            {"inputs": [], "function": "scene", "value_inputs": []},
            {"inputs": [0], "function": "filter_size", "value_inputs": ["large"]},
            {"inputs": [1], "function": function, "value_inputs": []},
        ],
        "question_index": index,
        "image_filename": f"CLEVR_val_{index:06d}.png",
        "question_family_index": 2,
        "split": "val",
        "answer": answer,
        "question": "How many large things are there?",
    }


def test_clevr_gives_its_counting_questions(tmp_path, capsys):
    questions = [
        clevr_question(0, "exist", "no"),
        clevr_question(1, "count", "5"),
        clevr_question(2, "greater_than", "yes"),
        clevr_question(3, "count", "0"),
    ]
    path = put(tmp_path / "CLEVR_val_questions.json", {"info": {"split": "val"}, "questions": questions})
    for index in (1, 3):
        put(tmp_path / f"images/val/CLEVR_val_{index:06d}.png", png(index))
    images = tmp_path / "images/val"
    assert run("clevr_count", tmp_path, split="val", questions=path, images=images) == 0
    assert "val: 2 questions (no official count known)" in capsys.readouterr().out
    assert [(row["id"], row["answers"]) for row in lines(tmp_path, "val")] == [("1", ["5"]), ("3", ["0"])]
    check("clevr_count", tmp_path, "val")
    (tmp_path / "out/val.jsonl").unlink()
    assert run("clevr_count", tmp_path, split="val", questions=path, images=images, limit=1) == 0
    assert len(lines(tmp_path, "val")) == 1
    assert run("clevr_count", tmp_path, split="train", questions=path, images=images) == 2
    assert "its split is 'val', not 'train'" in capsys.readouterr().err


def test_clevr_is_read_from_r1v_rows(tmp_path, capsys):
    solutions = ["<answer> 3 </answer>", "<answer>10</answer>", "4"]
    rows = [
        {
            "image": {"bytes": png(at), "path": None},
            "problem": "<image> How many items are there?",
            "solution": solution,
        }
        for at, solution in enumerate(solutions)
    ]
    features = {"image": image(), "problem": text(), "solution": text()}
    to_parquet(tmp_path / "rows/train-00000-of-00008.parquet", rows, features)
    assert run("clevr_count", tmp_path, split="train", source=tmp_path / "rows") == 0
    assert "train: 3 questions (official 70,000, DIFFERS)" in capsys.readouterr().out
    written = lines(tmp_path, "train")
    assert [row["answers"] for row in written] == [["3"], ["10"], ["4"]]
    assert written[0]["question"] == "How many items are there?"
    check("clevr_count", tmp_path, "train")
    to_parquet(tmp_path / "bad.parquet", [rows[0] | {"solution": "<answer> many </answer>"}], features)
    assert run("clevr_count", tmp_path, split="train", source=tmp_path / "bad.parquet") == 2
    assert "the solution is '<answer> many </answer>'" in capsys.readouterr().err


# ---- all ----


@pytest.mark.parametrize("name", ["vqav2", "okvqa", "textvqa", "gqa", "docvqa"])
def test_single_answers_of_tables_are_read(tmp_path, name):
    table = [
        {"index": at, "image": encoded() if at == 0 else "0", "question": "Q?", "answer": "yes"} for at in range(2)
    ]
    assert run(name, tmp_path, split="val", source=tsv(tmp_path / "a.tsv", table)) == 0
    assert [row["answers"] for row in lines(tmp_path, "val")] == [["yes"], ["yes"]]
    check(name, tmp_path, "val")


@pytest.mark.parametrize("name", ["vqav2", "okvqa", "textvqa", "gqa", "docvqa", "ocrvqa", "chartqa"])
def test_a_question_without_an_answer_is_named_with_its_file(tmp_path, name, capsys):
    images, given = tmp_path / "images", {"split": "val"}
    record = {
        "vqav2": {"questions": [vqa_question(*KEYS[0])]},
        "okvqa": {"questions": [vqa_question(*KEYS[0])]},
        "textvqa": {"data": [textvqa_record(0) | {"answers": ["", " "]}]},
        "gqa": {"7": {key: value for key, value in gqa_entry(0).items() if key != "answer"}},
        "docvqa": {"data": [docvqa_record(0, answers=[])]},
        "ocrvqa": {"7": ocrvqa_entry(0, 2) | {"answers": [None, "No"]}},
        "chartqa": [{"imgname": "a.png", "query": "How many?", "label": None}],
    }[name]
    path = put(tmp_path / "val_balanced_questions.json", record)
    for image in ("COCO_val2014_000000262148", "003a8ae2ef43b900", "2405720", "7"):
        put(images / f"{image}.jpg", jpeg())
    put(images / "pybv0228_80.png", png())
    given |= {"questions": path, "images": images}
    if name in ("vqav2", "okvqa"):
        annotation = vqa_annotation(*KEYS[0]) | {"answers": []}
        given |= {"annotations": put(tmp_path / "annotations.json", {"annotations": [annotation]})}
    if name == "chartqa":
        path = put(tmp_path / "val/val_human.json", record)
        put(tmp_path / "val/val_augmented.json", record)
        put(tmp_path / "val/png/a.png", png())
        given = {"split": "val", "data": tmp_path}
    assert run(name, tmp_path, **given) == 2
    said = capsys.readouterr().err
    assert "questions of val without an answer: " in said and str(path) in said
    assert not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize("answer", ["", None])
def test_a_row_of_a_table_has_an_answer_unless_its_split_has_none(tmp_path, answer, capsys):
    row = {"index": "0", "image": encoded(), "question": "Q?"} | ({} if answer is None else {"answer": answer})
    table = tsv(tmp_path / "a.tsv", [row])
    assert run("docvqa", tmp_path, split="val", source=table) == 2
    assert f"1 questions of val without an answer: 0 ({table}: record 0)" in capsys.readouterr().err
    assert run("docvqa", tmp_path, split="test", source=table) == 0
    assert lines(tmp_path, "test")[0]["answers"] == []


@pytest.mark.parametrize("name", ["vqav2", "okvqa", "textvqa", "gqa", "ocrvqa", "docvqa", "chartqa", "clevr_count"])
def test_every_script_explains_itself(name, capsys, tmp_path):
    module = importlib.import_module(f"data_scripts.{name}")
    assert module.main(["help=true"]) == 0
    out = capsys.readouterr().out
    assert "_vqa.py" not in out and '{"id", "image", "question", "answers", "question_id", "groups"}' in out
    assert module.main([f"out={tmp_path}", "split=vla", "source=x.tsv"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: split is 'vla'; accepted: train, val") and "Did you mean val?" in said
    assert f"python -m data_scripts.{name} out=DIR" in out and "limit=N" in out
    assert module.main([]) == 2
    assert "=… is missing" in capsys.readouterr().err
    assert module.main([f"out={tmp_path}", "--split", "val", "--colour=red"]) == 2
    assert "unknown argument '--colour=red'; accepted: out=…" in capsys.readouterr().err


def test_texts_in_a_field():
    assert texts_of("['it''s', \"b\"]") == ["its", "b"]
    assert texts_of("[]") == ["[]"] and texts_of("[1]") == ["[1]"] and texts_of("[x") == ["[x"]
    assert texts_of("[" * 5000) == ["[" * 5000]
