"""What data scripts share: readers of every published form, whole or no files, problems named, runs that go on."""

import base64
import csv
import gzip
import io
import json
import os
import signal
import sys
import tracemalloc
import zipfile

import pytest
from PIL import Image

from data_scripts import agd20k, coco_detection, geometry3k, gsm8k, mathvista
from data_scripts.writing import (
    DataError,
    Problems,
    SplitWriter,
    StoredImage,
    image_bytes,
    image_source,
    load_hub,
    open_member,
    read_json_array,
    read_json_object,
    read_jsonl,
    read_parquet,
    read_tsv,
    report,
    required,
    run_script,
    whole_number,
)


def png(index, size=(8, 6)):
    file = io.BytesIO()
    Image.new("RGB", size, (index % 256, index // 256, 7)).save(file, "PNG")
    return file.getvalue()


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write(writer, split, row_id, image):
    assert writer.take(split, row_id)
    if stored := writer.image(image):
        writer.write(split, {"id": row_id, "image": stored.path, "size": stored.size})


# ---- writing ----


def test_splits_appear_whole_when_all_is_well(tmp_path):
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco/a.png").write_bytes(png(1))
    out = tmp_path / "out"
    with SplitWriter(out) as writer:
        write(writer, "val", "x", tmp_path / "coco/a.png")
        write(writer, "train", "y", ("y", png(2)))
        assert names(out) == ["images/y.png", "train.jsonl.part", "val.jsonl.part"]
    assert names(out) == ["images/y.png", "train.jsonl", "val.jsonl"]
    assert json.loads((out / "val.jsonl").read_text()) == {"id": "x", "image": "../coco/a.png", "size": [8, 6]}
    assert json.loads((out / "train.jsonl").read_text())["image"] == "images/y.png"
    assert (out / "images/y.png").read_bytes() == png(2)
    assert writer.counts == {"val": 1, "train": 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, DataError])
def test_an_interrupted_run_leaves_earlier_splits_as_they_were(tmp_path, error):
    with SplitWriter(tmp_path) as writer:
        write(writer, "val", "old", ("a", png(1)))
    before = (tmp_path / "val.jsonl").read_bytes()
    with pytest.raises(error), SplitWriter(tmp_path) as writer:
        write(writer, "val", "new", ("b", png(2)))
        raise error
    assert (tmp_path / "val.jsonl").read_bytes() == before
    assert names(tmp_path) == ["images/a.png", "images/b.png", "val.jsonl"]


def test_the_next_run_does_not_write_images_again(tmp_path):
    with pytest.raises(KeyboardInterrupt), SplitWriter(tmp_path) as writer:
        write(writer, "val", "0", ("0", png(0)))
        (tmp_path / "images/1.png.part").write_bytes(png(1)[:20])  # killed while writing
        raise KeyboardInterrupt
    (tmp_path / "val.jsonl.part").write_text("left by a kill")
    stamp = (tmp_path / "images/0.png").stat().st_mtime_ns
    with SplitWriter(tmp_path) as writer:
        for index in range(2):
            write(writer, "val", str(index), (str(index), png(index)))
    assert (tmp_path / "images/0.png").stat().st_mtime_ns == stamp
    assert (tmp_path / "images/1.png").read_bytes() == png(1)
    assert names(tmp_path) == ["images/0.png", "images/1.png", "val.jsonl"]


def test_a_killed_run_goes_on_to_the_same_files(tmp_path):
    def convert(out, killed_at=None):
        with SplitWriter(out) as writer:
            for index in range(4):
                if index == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(writer, "val", str(index), (str(index), png(index)))

    convert(tmp_path / "whole")
    for at in (1, 3):
        child = os.fork()
        if child == 0:
            convert(tmp_path / "out", killed_at=at)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert not (tmp_path / "out/val.jsonl").exists()
    convert(tmp_path / "out")
    assert names(tmp_path / "out") == names(tmp_path / "whole")
    assert (tmp_path / "out/val.jsonl").read_bytes() == (tmp_path / "whole/val.jsonl").read_bytes()


def test_an_image_of_an_earlier_run_with_other_content_is_replaced(tmp_path):
    for index in (1, 2):
        with SplitWriter(tmp_path) as writer:
            write(writer, "val", "a", ("a", png(index)))
        assert (tmp_path / "images/a.png").read_bytes() == png(index)


def test_problems_are_named_together_and_nothing_is_written(tmp_path):
    (tmp_path / "cut.png").write_bytes(png(1, (90, 90))[:-30])
    (tmp_path / "text.png").write_text("no image")
    out = tmp_path / "out"
    with pytest.raises(DataError) as caught, SplitWriter(out) as writer:
        write(writer, "val", "good", ("good", png(0)))
        for index in range(7):
            write(writer, "val", f"m{index}", tmp_path / f"none{index}.png")
        write(writer, "val", "cut", tmp_path / "cut.png")
        write(writer, "val", "text", tmp_path / "text.png")
        write(writer, "val", "bytes", ("bytes", b"broken"))
        write(writer, "val", "good", ("good", png(0)))
        write(writer, "val", "other", ("good", png(9)))
    message = str(caught.value)
    assert "7 images missing: " in message and "none4.png, and 2 more" in message and "none5.png" not in message
    assert "3 images that cannot be opened: " in message and "cut.png (" in message and "bytes (" in message
    assert "1 ids that stand twice: good" in message
    assert "1 names that two different images have: good" in message
    assert not list(out.glob("*.jsonl*"))


def test_ids_may_stand_in_two_splits(tmp_path):
    with SplitWriter(tmp_path) as writer:
        write(writer, "val", "a", ("a", png(0)))
        write(writer, "train", "a", ("a", png(0)))
    assert writer.counts == {"val": 1, "train": 1}


def test_the_limit_counts_rows_of_each_split(tmp_path):
    with SplitWriter(tmp_path, limit=2) as writer:
        taken = [writer.take(split, str(at)) for at, split in enumerate(["val", "val", "train", "val", "train", "val"])]
        writer.write("val", {"id": "0"})
    assert taken == [True, True, True, False, True, False]


def test_a_file_with_more_rows_is_not_replaced(tmp_path, capsys):
    def convert(options):
        with SplitWriter(tmp_path / "out", whole_number(options, "limit")) as writer:
            for split in ("train", "val"):
                for index in range(int(options["rows"])):
                    if writer.take(split, str(index)):
                        writer.write(split, {"id": str(index), "run": options["rows"]})
        return []

    def run(*arguments):
        return run_script("", ("rows", "limit"), convert, arguments)

    assert run("rows=5") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for arguments, said in ((("rows=9", "limit=2"), "this run with limit=2 would"), (("rows=2",), "this run would")):
        assert run(*arguments) == 2
        assert f"{tmp_path / 'out/train.jsonl'} has 5 rows, and {said} leave 2" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert run("rows=9", "limit=5") == run("rows=9") == 0
    assert (tmp_path / "out/val.jsonl").read_text().count('"run": "9"') == 9


def test_a_source_without_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match="the source holds no row"), SplitWriter(tmp_path):
        pass


def test_image_names_cannot_leave_the_folder(tmp_path):
    with SplitWriter(tmp_path / "out") as writer:
        write(writer, "val", "a", ("../../a b/c", png(0)))
    assert names(tmp_path) == ["out/images/.._.._a_b_c.png", "out/val.jsonl"]


def test_memory_does_not_grow_with_rows_or_images(tmp_path):
    encoded = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(encoded, "PNG")  # about 40 kB
    tracemalloc.start()
    with SplitWriter(tmp_path) as writer:
        for index in range(200):  # 8 MB of images, 8 MB of text
            assert writer.take("val", str(index))
            stored = writer.image((str(index), encoded.getvalue()))
            writer.write("val", {"id": str(index), "image": stored.path, "text": "x" * 40_000})
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5e5 and peak < 2e6


def test_ids_and_what_is_known_of_images_are_not_held_in_memory(tmp_path):
    (tmp_path / "a.png").write_bytes(png(0))
    tracemalloc.start()
    with SplitWriter(tmp_path / "out") as writer:
        for index in range(5_000):
            assert writer.take("val", f"{index:0200}")  # a megabyte of ids
            writer._looked_at(f"{index:0200}", lambda: StoredImage("images/a.png", (8, 6)))
        writer.write("val", {"id": f"{7:0200}"})
        assert writer._looked_at(f"{4_999:0200}", lambda: None) == (StoredImage("images/a.png", (8, 6)), False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e5


# ---- reading ----

RECORDS = [{"id": index, "text": f"é{index}", "share": index / 4, "many": [1, 2]} for index in range(3)]


@pytest.mark.parametrize("form", ["json", "zip", "gz"])
def test_json_is_streamed_from_a_file_or_an_archive(tmp_path, form):
    content = json.dumps({"info": {"questions": 5}, "questions": RECORDS, "data_subtype": "val2014"})
    path = tmp_path / f"v2_questions.json{'' if form == 'json' else '.' + form}"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("folder/v2_val2014_questions.json", content)
            archive.writestr("folder/v2_train2014_questions.json", "{}")
            archive.writestr("__MACOSX/folder/._v2_val2014_questions.json", "junk")
    else:
        with (gzip.open if form == "gz" else open)(path, "wb") as file:
            file.write(content.encode())
    assert list(read_json_array(path, "questions.item", "*_val2014_questions.json")) == RECORDS
    first = next(read_json_array(path, "questions.item", "*_val2014_questions.json"))
    assert type(first["share"]) is float


def test_objects_are_read_key_by_key(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"k1": {"a": 1}, "k2": [2]}))
    assert list(read_json_object(tmp_path / "a.json")) == [("k1", {"a": 1}), ("k2", [2])]


def test_json_reading_needs_no_memory_for_the_whole_file(tmp_path):
    path = tmp_path / "big.json"
    with path.open("w") as file:
        file.write("[" + ",".join(json.dumps({"id": at, "text": "y" * 1000}) for at in range(8000)) + "]")
    tracemalloc.start()
    assert sum(1 for _ in read_json_array(path)) == 8000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6  # of 8 MB


@pytest.mark.parametrize(
    ("content", "prefix", "message"),
    [
        ('[{"a": 1}, {"a"', "item", "damaged or only half downloaded"),
        ("", "item", "damaged or only half downloaded"),
        ("not json", "item", "damaged or only half downloaded"),
        ('{"data": []}', "questions.item", "holds nothing at 'questions.item'"),
        ("[]", "item", "holds nothing at 'item'"),
    ],
)
def test_json_that_is_not_as_it_should_be_is_named(tmp_path, content, prefix, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"a\.json.*{message}") as raised:
        list(read_json_array(tmp_path / "a.json", prefix))
    assert "\n" not in str(raised.value)


def test_files_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"a": 1}]')
    assert list(read_json_array(tmp_path / "a.json")) == [{"a": 1}]
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "a.json", "a.json")
    assert list(read_json_array(tmp_path / "a.zip")) == [{"a": 1}]


def test_archives_that_are_damaged_inside_or_locked_are_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", json.dumps(list(range(9999))))
        start = archive.getinfo("a.json").header_offset + 30 + len("a.json")
    content = bytearray(path.read_bytes())
    content[start : start + 50] = b"\xff" * 50
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip is damaged"):
        list(read_json_array(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.png", png(1))
    content = bytearray(path.read_bytes())
    content[6] |= 1  # encrypted, in the member's header and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip is damaged.*password"):
        image_source(path)("a.png")


def test_half_characters_are_replaced(tmp_path):
    with SplitWriter(tmp_path) as writer:
        assert writer.take("val", "x")
        writer.write("val", {"id": "x", "question": "what \ud83d?"})
    assert json.loads((tmp_path / "val.jsonl").read_text())["question"] == "what ??"


def test_missing_and_broken_archives_are_named(tmp_path):
    with pytest.raises(DataError, match=r"missing: .*none\.json"):
        list(read_json_array(tmp_path / "none.json"))
    (tmp_path / "a.zip").write_bytes(b"PK cut")
    with pytest.raises(DataError, match=r"a\.zip is damaged"), open_member(tmp_path / "a.zip"):
        pass
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"[1, 2]" * 999)[:30])
    with pytest.raises(DataError, match=r"b\.json\.gz is damaged"):
        list(read_json_array(tmp_path / "b.json.gz"))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("one.json", "[]")
        archive.writestr("two.json", "[]")
    with pytest.raises(DataError, match=r"must hold one file called \*\.json; it holds one\.json, two\.json"):
        list(read_json_array(tmp_path / "c.zip", member="*.json"))


def test_jsonl_names_bad_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON object, but a list"):
        list(read_jsonl(path))
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"a\.jsonl:1: not a JSON object: maximum recursion"):
        list(read_jsonl(path))
    (tmp_path / "a.json").write_text('[{"a": 1}, 2]')
    with pytest.raises(DataError, match=r"a\.json: row 1 is no object, but a int"):
        list(load_hub(str(tmp_path / "a.json"), "val"))


def test_tsv_rows_bring_their_images(tmp_path):
    big = png(3, (40, 40))
    encoded = {index: base64.b64encode(png(index, (20, 20))).decode() for index in (1, 2)}
    rows = [
        ("0", encoded[1], "what?\nof two lines", 'say "x"\tnow'),
        ("7", "0", "shares the image of row 0", "b"),
        ("8", "9", "shares the image of a later row", "c"),
        ("9", encoded[2], "é", "d"),
        ("10", f"['{encoded[1]}', '{base64.b64encode(big).decode()}']", "two", "e"),
        ("11", "", "none", "f"),
    ]
    path = tmp_path / "bench.tsv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerows([("index", "image", "question", "answer"), *rows])
    limit = csv.field_size_limit()
    read = list(read_tsv(path))
    assert [row["index"] for row in read] == ["0", "7", "8", "9", "10", "11"]
    assert [row["image"] for row in read] == [
        [png(1, (20, 20))],
        [png(1, (20, 20))],
        [png(2, (20, 20))],
        [png(2, (20, 20))],
        [png(1, (20, 20)), big],
        [],
    ]
    assert read[0]["question"] == "what?\nof two lines" and read[0]["answer"] == 'say "x"\tnow'
    assert csv.field_size_limit() == limit


def test_tsv_fields_may_be_larger_than_csv_allows_by_default(tmp_path):
    file = io.BytesIO()
    Image.effect_noise((500, 500), 90).save(file, "PNG")
    field = base64.b64encode(file.getvalue()).decode()
    assert len(field) > csv.field_size_limit()
    (tmp_path / "a.tsv").write_text(f"\ufeffindex\timage\n0\t{field}\n1\t0\n", encoding="utf-8")
    assert [row["image"] for row in read_tsv(tmp_path / "a.tsv")] == [[file.getvalue()]] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0\tabc", "shares the image of row 'abc', which is not there"),
        ("0\t0", "shares the image of row '0', which has none of its own"),
        ("0\t" + "?" * 80, "row 1: the image cannot be decoded"),
        ("0\ta\tb", "3 fields, where 2 are named"),
    ],
)
def test_wrong_tsv_rows_are_named(tmp_path, line, message):
    (tmp_path / "a.tsv").write_text(f"index\timage\n{line}\n")
    with pytest.raises(DataError, match=message):
        list(read_tsv(tmp_path / "a.tsv"))


def dataset(count=40, first=0):
    import datasets

    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image()})
    rows = [{"id": index, "image": {"bytes": png(index), "path": None}} for index in range(first, first + count)]
    return datasets.Dataset.from_list(rows, features=features)


def identities(rows):
    rows = list(rows)
    assert all(image_bytes(row["image"]) == png(row["id"]) for row in rows)
    return [row["id"] for row in rows]


def test_the_same_rows_come_from_every_form_of_the_hub(tmp_path, monkeypatch):
    import datasets

    rows = dataset()
    rows.to_parquet(tmp_path / "one.parquet", batch_size=7)
    (tmp_path / "shards/data").mkdir(parents=True)
    for part in range(2):
        dataset(20, 20 * part).to_parquet(tmp_path / f"shards/data/val-{part:05d}-of-00002-abc.parquet")
    dataset(1, 99).to_parquet(tmp_path / "shards/data/validation-00000-of-00001.parquet")
    rows.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"val": rows}).save_to_disk(tmp_path / "dict")
    expected = list(range(40))
    for source in ("one.parquet", "shards", "disk", "dict"):
        assert identities(load_hub(str(tmp_path / source), "val")) == expected
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return rows.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert identities(load_hub("lab/set", "val", "config")) == expected
    assert asked == [(("lab/set", "config"), {"split": "val", "streaming": True})]


def test_a_folder_of_several_configurations_is_read_by_one_of_them(tmp_path):
    for number, config in enumerate(("full", "sanitized")):
        (tmp_path / "mbpp" / config).mkdir(parents=True)
        dataset(2, 10 * number).to_parquet(tmp_path / "mbpp" / config / "test-00000-of-00001.parquet")
    source = str(tmp_path / "mbpp")
    assert identities(load_hub(source, "test", "full")) == identities(load_hub(f"{source}/full", "test")) == [0, 1]
    assert identities(load_hub(f"{source}/sanitized", "test", "full")) == [10, 11]  # the folder that was named
    with pytest.raises(DataError, match=rf"several sub-folders.*: full, sanitized\. Give .* such as {source}/full\."):
        list(load_hub(source, "test"))


def test_a_hub_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    import datasets

    def load(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="lab/set: split 'val' cannot be read: offline"):
        list(load_hub("lab/set", "val"))
    datasets.DatasetDict({"test": dataset(1)}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match="has no split 'val'; it has test"):
        list(load_hub(str(tmp_path / "dict"), "val"))
    (tmp_path / "shards").mkdir()
    dataset(1).to_parquet(tmp_path / "shards/test-0.parquet")
    with pytest.raises(DataError, match=r"no parquet file of split 'val'; the files there: test-0\.parquet"):
        list(load_hub(str(tmp_path / "shards"), "val"))
    whole = (tmp_path / "shards/test-0.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.parquet is damaged"):
        list(read_parquet(tmp_path / "cut.parquet"))


def test_images_of_rows_are_bytes_or_paths(tmp_path):
    (tmp_path / "a.png").write_bytes(png(1))
    assert image_bytes(png(1)) == image_bytes({"bytes": png(1), "path": "gone.png"}) == png(1)
    assert image_bytes({"bytes": None, "path": str(tmp_path / "a.png")}) == png(1)
    with pytest.raises(DataError, match="a row's image is a NoneType"):
        image_bytes(None)


def test_images_come_from_a_folder_or_a_zip(tmp_path):
    (tmp_path / "folder").mkdir()
    assert image_source(tmp_path / "folder")("x/1.png") == tmp_path / "folder/x/1.png"
    with zipfile.ZipFile(tmp_path / "val2014.zip", "w") as archive:
        archive.writestr("val2014/1.png", png(1))
        archive.writestr("a/2.png", png(2))
        archive.writestr("b/2.png", png(3))
    read = image_source(tmp_path / "val2014.zip")
    assert read("1.png") == ("1", png(1)) and read("val2014/1.png") == ("val2014/1", png(1))
    assert read("b/2.png") == ("b/2", png(3))
    assert not read("none.png").exists() and read("4/1.png") == tmp_path / "val2014.zip/4/1.png"
    with pytest.raises(DataError, match=r"several members end in '2\.png': a/2\.png, b/2\.png"):
        read("2.png")
    with pytest.raises(DataError, match="give the folder of the images"):
        image_source(tmp_path / "nowhere")


# ---- the command ----


def test_problems_without_any_raise_nothing():
    Problems().raise_if_any()


def test_the_report_puts_counts_beside_the_official_ones():
    official = {"train": 10, "val": 20, "test": 30}
    assert report({"train": 10, "val": 1234, "extra": 1}, official, None, "rows") == [
        "train: 10 rows (official 10)",
        "val: 1,234 rows (official 20, DIFFERS)",
        "extra: 1 rows (no official count known)",
        "test: not in the source",
    ]
    assert report({"val": 3}, official, 3, "rows") == ["val: 3 rows (official 20, limit=3)"]
    assert report({"val": 3}, {}, 3, "rows") == ["val: 3 rows (no official count known, limit=3)"]
    assert report({"val": 20}, official, None, "rows", every=False) == ["val: 20 rows (official 20)"]


@pytest.mark.parametrize(
    "argv",
    [["out=a=b", "limit=3"], ["--out=a=b", "--limit=3"], ["--out", "a=b", "--limit", "3"], ["limit=3", "out=a=b"]],
)
def test_options_are_accepted_in_every_usual_form(argv, capsys):
    seen = []

    def convert(options):
        seen.append(dict(options))
        return ["one", "two"]

    assert run_script("the doc", ("out", "limit"), convert, argv) == 0
    assert seen == [{"out": "a=b", "limit": "3"}]
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["colour=red"], "error: unknown argument 'colour=red'; accepted: out=…, limit=…, help=…\n"),
        (["lmit=3"], "accepted: out=…, limit=…, help=…. Did you mean limit?"),
        (["out"], "unknown argument 'out'"),
        (["--out"], "unknown argument '--out'"),
        (["out=x", "limit=some"], "limit is 'some'; accepted: a whole number from 1"),
        (["out=x", "limit=0"], "limit is '0'"),
        (["out=x", "limit=²"], "limit is '²'"),
        ([], "out=… is missing"),
    ],
)
def test_wrong_options_are_named(argv, error, capsys):
    def convert(options):
        return [*required(options, "out"), str(whole_number(options, "limit"))]

    assert run_script("the doc", ("out", "limit"), convert, argv) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "split", "said"),
    [
        (agd20k, "sen", "accepted: seen, unseen. Did you mean seen?"),
        (coco_detection, "vla", "accepted: train, val. Did you mean val?"),
        (geometry3k, "vla", "accepted: train, val, test, validation. Did you mean val?"),
        (gsm8k, "tset", "accepted: train, test, val. Did you mean test?"),
        (mathvista, "mini", "accepted: testmini, test. Did you mean testmini?"),
    ],
)
def test_the_splits_are_named(script, split, said, tmp_path, capsys):
    given = [f"{name}={tmp_path / name}" for name in script.OPTIONS if name not in ("split", "limit")]
    assert run_script("", script.OPTIONS, script.convert, [*given, f"split={split}"]) == 2
    assert capsys.readouterr().err == f"error: split is {split!r}; {said}\n"


def test_help_prints_the_doc_and_an_interrupt_ends_quietly(capsys):
    def convert(options):
        raise KeyboardInterrupt

    for word in ("-h", "--help", "help", "help=true", "--help=true"):
        assert run_script("the doc", (), convert, [word]) == 0
        assert "the doc" in capsys.readouterr().out
    assert run_script("the doc", (), convert, []) == 130
    assert "interrupted" in capsys.readouterr().err


def test_what_is_no_user_error_is_not_hidden():
    def convert(options):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_script("", (), convert, [])
    assert "data_scripts.writing" in sys.modules
