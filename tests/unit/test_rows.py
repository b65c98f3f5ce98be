"""Rows of JSONL read by offsets: which row, which error, how much memory; and rows of the hub."""

import json
import pickle
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tasks._rows import HubImages, check_limit, load_hub, read_hub_rows, read_rows
from vlm_grpo.common.errors import UserError
from vlm_grpo.task import Sample, check_samples


def make(row, folder):
    return Sample(row["id"], [folder / row["image"]], row["question"], row["answers"])


def read(folder, split="val", limit=None, keys=()):
    return read_rows(folder, split, make, "mine", limit, keys)


def write(folder, rows, split="val", separator="\n"):
    text = separator.join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / f"{split}.jsonl").write_bytes(text.encode())


def row(index, **more):
    return {"id": f"r{index}", "image": f"{index}.png", "question": f"Wie heißt {index} \N{PILE OF POO}?"} | {
        "answers": [str(index)],
        **more,
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12), st.booleans())
def test_every_row_is_read_from_its_own_offset(tmp_path_factory, questions, escapes):
    folder = tmp_path_factory.mktemp("rows")
    rows = [row(index, question=question) for index, question in enumerate(questions)]
    lines = "\n\n".join(json.dumps(each, ensure_ascii=escapes) for each in rows)
    (folder / "val.jsonl").write_bytes(lines.encode())
    samples = read(folder)
    assert samples.ids == [each["id"] for each in rows]
    for index in reversed(range(len(rows))):
        assert samples[index] == make(rows[index], folder)


def test_limit_and_slices_choose_rows(tmp_path):
    write(tmp_path, [row(index) for index in range(9)], separator="\r\n")
    samples = read(tmp_path, limit=5)
    assert len(samples) == 5
    assert [each.id for each in samples[1:4]] == ["r1", "r2", "r3"]
    assert samples.take([4, 0])[0].target == ["4"]
    check_samples(samples, "val")


def test_rows_beyond_the_limit_are_not_read(tmp_path):
    write(tmp_path, [row(0), "{"])
    assert read(tmp_path, limit=1)[0].id == "r0"
    with pytest.raises(UserError, match=r"val\.jsonl:2: not a JSON object"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1, 2]", "not a JSON object, but a list"),
        ('"id"', "not a JSON object, but a str"),
        ('{"image": "a.png"}', "the key 'id' is missing"),
        ('{"id": 7, "answers": []}', "the id is 7; ids are text"),
        ('{"id": "b"}', "the key 'answers' is missing; a row has id, answers"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "not a JSON object"),
    ],
)
def test_a_bad_line_is_named_before_the_run_begins(tmp_path, line, message):
    write(tmp_path, [row(0), "", line, row(2)])
    with pytest.raises(UserError) as caught:
        read(tmp_path, keys=("answers",))
    assert message in str(caught.value) and "val.jsonl:3" in str(caught.value)


def test_what_make_cannot_read_is_named_with_its_line(tmp_path):
    rows = [row(0), row(1), row(2)]
    del rows[1]["question"]
    rows[2]["image"] = 5
    write(tmp_path, rows)
    samples = read(tmp_path)
    with pytest.raises(UserError, match=r"val\.jsonl:2: the key 'question' is missing; the row has id, image, answers"):
        samples[1]
    with pytest.raises(UserError, match=r"val\.jsonl:3: the row cannot be read"):
        samples[2]
    assert samples[0].id == "r0"


def test_a_missing_split_names_the_splits_there_are_and_the_command(tmp_path):
    write(tmp_path, [row(0)], "train")
    write(tmp_path, [row(0)], "testA")
    with pytest.raises(UserError, match=r"splits in .*: testA, train. Make it with `python -m data_scripts\.mine`"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"nowhere', which is no folder. Make it with `python -m data_scripts\.mine`"):
        read(tmp_path / "nowhere")


def test_a_file_that_changed_meanwhile_is_noticed(tmp_path):
    write(tmp_path, [row(0), row(1)])
    samples = read(tmp_path)
    write(tmp_path, [row(5), row(6)])
    with pytest.raises(UserError, match="has changed since it was opened"):
        samples[1]


def test_empty_files_have_no_rows(tmp_path):
    (tmp_path / "val.jsonl").write_text("\n \n")
    with pytest.raises(UserError, match="is empty"):
        check_samples(read(tmp_path), "val")


def test_samples_can_cross_to_another_process(tmp_path):
    write(tmp_path, [row(0)])
    sample = read(tmp_path)[0]
    assert pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.slow
def test_memory_holds_ids_and_offsets_only(tmp_path):
    with (tmp_path / "val.jsonl").open("w") as file:
        for index in range(1000):
            file.write(json.dumps(row(index, answers=["x" * 16000])) + "\n")  # 16 MB in all
    tracemalloc.start()
    samples = read(tmp_path)
    assert sum(len(sample.target) for sample in samples) == 1000
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 1000
    assert held < 3e5 and peak < 1e6  # an id of text takes about 60 bytes, an offset 8


@pytest.mark.parametrize("limit", [0, -1, 1.5, "10", True])
def test_a_wrong_limit_is_named(limit):
    with pytest.raises(UserError, match=r"task_args\.limit is"):
        check_limit(limit)


# ---- the hub ----


def hub(count=4):
    import datasets

    features = datasets.Features(
        {"key": datasets.Value("int64"), "image": datasets.Image(), "question": datasets.Value("string")}
    )
    rows = [
        {"key": 100 + index, "image": Image.new("RGB", (20 + index, 9), (index, 0, 0)), "question": f"q{index}"}
        for index in range(count)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def make_hub(sample_id, number, split, row, images):
    return Sample(sample_id, images, row["question"], (number, split, sorted(row)))


def test_hub_rows_are_read_on_access():
    samples = read_hub_rows(hub(), "val", "key", make_hub, limit=3)
    assert samples.ids == ["100", "101", "102"]
    assert samples[2].question == "q2" and samples[2].target == (2, "val", ["key", "question"])
    assert [image.size for image in samples[2].images] == [(22, 9)] and samples[2].images[0].mode == "RGB"
    assert read_hub_rows(hub(), "val", None, make_hub).ids == ["val-0", "val-1", "val-2", "val-3"]


def test_hub_rows_of_another_form_are_named():
    with pytest.raises(UserError, match=r"rows lack \['other'\]; they have \['key', 'image', 'question'\]"):
        read_hub_rows(hub(), "val", "other", make_hub)

    def failing(*_):
        raise KeyError("answers")

    with pytest.raises(UserError, match="'val', row 1: it cannot be read: KeyError"):
        read_hub_rows(hub(), "val", "key", failing)[1]


def test_an_image_is_a_sequence_of_one():
    images = HubImages(hub().select_columns(["image"]).cast_column("image", undecoded()), 1)
    assert len(images) == 1 and images[-1].size == images[0].size == (21, 9)
    assert [image.size for image in images[:1]] == [(21, 9)]
    with pytest.raises(IndexError):
        images[1]


def test_an_image_that_is_too_large_is_named(monkeypatch):
    images = HubImages(hub().select_columns(["image"]).cast_column("image", undecoded()), 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(UserError, match=r"row 1: the image None cannot be read: .*decompression bomb"):
        images[0]


def undecoded():
    import datasets

    return datasets.Image(decode=False)


def test_a_hub_that_cannot_be_reached_is_explained(monkeypatch):
    import datasets

    asked = []

    def load(*args, split):
        asked.append((*args, split))
        raise (ConnectionError("offline"), ValueError("Unknown split"))[len(asked) - 1]

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"lab/a cannot be read from the hub: offline. Do this."):
        load_hub("lab/a", None, "val", "Do this.")
    with pytest.raises(UserError, match=r"lab/a has no split 'val' \(Unknown split\). Do this."):
        load_hub("lab/a", "config", "val", "Do this.")
    assert asked == [("lab/a", "val"), ("lab/a", "config", "val")]
