"""Files of the common forms as a task, scored by a reward part by name."""

import io
import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tasks._formats import form_of
from tasks._rewards import REWARDS, Target
from tasks._tables import open_parts
from tasks.jsonl import Jsonl
from vlm_grpo.common.errors import UserError
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task import check_task, find_task


def png(size: tuple[int, int] = (100, 90)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (10, 200, 30)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "images" / name).write_bytes(png())
    return tmp_path


def write(path: Path, *rows: dict[str, Any]) -> str:
    lines = [json.dumps(row) for row in rows]
    path.write_text(f"[{', '.join(lines)}]" if path.suffix == ".json" else "\n".join(lines) + "\n")
    return str(path)


PLAIN = {"image": "images/1.png", "question": "<image>How many?", "answer": "4"}
CONVERSATION = {
    "id": 1,
    "image": "images/1.png",
    "conversations": [
        {"from": "human", "value": "<image>What number of purple metallic balls are there?"},
        {"from": "gpt", "value": "<answer> 0 </answer>"},
    ],
}
SWIFT = {
    "messages": [
        {"role": "system", "content": "Think first."},
        {"role": "user", "content": "<image>What is it?"},
    ],
    "images": ["images/1.png"],
    "solution": "a cup",
}
VERL = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"role": "user", "content": "<image>Find x."}],
    "images": [{"bytes": png(), "path": None}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
    "extra_info": {"split": "train", "index": 0, "answer": "\\frac{1}{2}", "question": "<image>Find x."},
}
REC = {"image": "images/1.png", "problem": "the cup", "solution": [1.0, 2.0, 30.0, 40.0], "height": 90, "width": 100}
TRAJECTORY = {
    "image": "images/1.png",
    "question": "Move.",
    "question_type": "trajectory-sharerobot",
    "answer": [[1, 2], [30, 4], [50, 60]],
}


SHOWN = "How many?\n(A) 2\n(B) 4"
ASKED = CONVERSATION["conversations"][0]
MCQ = CONVERSATION | {"accu_reward_method": "mcq", "conversations": [ASKED, {"from": "gpt", "value": "C"}]}
THINGS = [{"bbox_2d": [1, 2, 30, 40], "label": "cup"}]


def said(answer: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": answer}]
    return {"image": "images/1.png", "conversations": turns}


@pytest.mark.parametrize(
    ("row", "reward", "form", "question", "reference"),
    [
        (PLAIN, "number", "question and answer", "How many?", "4"),
        (PLAIN | {"answer": 4}, "exact_match", "question and answer", "How many?", "4"),
        (PLAIN | {"answer": 4.0}, "exact_match", "question and answer", "How many?", "4"),
        (PLAIN | {"answer": 4.5}, "math", "question and answer", "How many?", "4.5"),
        (PLAIN | {"answer": ["four", "4"]}, "exact_match", "question and answer", "How many?", "four"),
        (PLAIN | {"answer": ["4"] * 10}, "vqa_accuracy", "question and answer", "How many?", "4"),
        (PLAIN | {"answer": "Invoice 7"}, "anls", "question and answer", "How many?", "Invoice 7"),
        (PLAIN | {"answer": "12%"}, "relaxed_accuracy", "question and answer", "How many?", "12%"),
        (PLAIN | {"answer": "B", "options": ["2", "4"]}, "multiple_choice", "question and answer", SHOWN, "B"),
        (PLAIN | {"answer": "4", "choices": ["2", "4"]}, "multiple_choice", "question and answer", SHOWN, "4"),
        (PLAIN | {"answer": "B", "options": "['2', '4']"}, "multiple_choice", "question and answer", SHOWN, "B"),
        (PLAIN | {"answer": "B", "options": '["2", "4"]'}, "multiple_choice", "question and answer", SHOWN, "B"),
        (PLAIN | {"answer": ["B"], "options": [2.0, 4]}, "multiple_choice", "question and answer", SHOWN, "B"),
        (PLAIN | {"answer": "4", "options": {"B": "4", "A": "2", "C": None}}, "multiple_choice", "question and answer",
         SHOWN, "4"),
        (PLAIN | {"answer": "(B)", "options": ["B", "4"]}, "multiple_choice", "question and answer",
         "How many?\n(A) B\n(B) 4", "(B)"),
        (PLAIN | {"answer": "C", "options": "[]"}, "multiple_choice", "question and answer", "How many?", "C"),
        (PLAIN | {"answer": "C", "options": ""}, "multiple_choice", "question and answer", "How many?", "C"),
        (REC, "box_iou", "question and answer", "the cup", "[1.0, 2.0, 30.0, 40.0]"),
        (REC, "points", "question and answer", "the cup", "[[15.5, 21.0]]"),
        (TRAJECTORY, "trajectory", "question and answer", "Move.", "[[1.0, 2.0], [30.0, 4.0], [50.0, 60.0]]"),
        (REC | {"solution": THINGS}, "detections", "question and answer", "the cup",
         '[{"bbox_2d": [1.0, 2.0, 30.0, 40.0], "label": "cup"}]'),
        (CONVERSATION, "number", "conversations (VLM-R1)", "What number of purple metallic balls are there?", "0"),
        (said(3), "exact_match", "conversations (VLM-R1)", "What?", "3"),
        (said(3.0), "exact_match", "conversations (VLM-R1)", "What?", "3"),
        (said([1, 2.5, 30, 40]), "box_iou", "conversations (VLM-R1)", "What?", "[1.0, 2.5, 30.0, 40.0]"),
        (said(THINGS), "detections", "conversations (VLM-R1)", "What?",
         '[{"bbox_2d": [1.0, 2.0, 30.0, 40.0], "label": "cup"}]'),
        (said(["a", "é"]), "exact_match", "conversations (VLM-R1)", "What?", '["a", "é"]'),
        (said("<think>2 + 2</think><answer>4</answer>"), "exact_match", "conversations (VLM-R1)", "What?", "4"),
        (MCQ, None, "conversations (VLM-R1)", "What number of purple metallic balls are there?", "C"),
        (SWIFT, "exact_match", "messages (ms-swift)", "Think first.\nWhat is it?", "a cup"),
        (VERL | {"images": ["images/1.png"]}, None, "verl", "Find x.", "\\frac{1}{2}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_every_form_and_reward_is_a_task(folder: Path, row, reward, form, question, reference, suffix: str):
    adapter = Jsonl(write(folder / f"train{suffix}", row), reward=reward)
    assert f"form of the rows: {form}" in adapter.metric_note
    check_task(adapter)
    sample = adapter.samples("train")[0]
    assert (sample.question, adapter.reference_answer(sample)) == (question, reference)
    assert list(sample.images) == [folder / "images/1.png"]
    assert adapter.coordinates is (reward in ("box_iou", "points", "trajectory", "detections"))


def test_a_split_in_two_files_is_refused(tmp_path):
    for suffix in (".json", ".jsonl"):
        (tmp_path / f"val{suffix}").write_text(json.dumps([PLAIN] if suffix == ".json" else PLAIN))
    with pytest.raises(UserError, match=r"several files of split 'val': val\.jsonl, val\.json\. Leave one"):
        Jsonl(str(tmp_path), "number").samples("val")


@pytest.mark.parametrize(
    ("row", "reward", "message"),
    [
        (PLAIN | {"answer": None}, "number", r"its keys are image, question, answer \(of which answer hold nothing\)"),
        ({"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "4"}],
          "accu_reward_method": "mine"}, None, r"a\.jsonl:1: .* how it is scored: 'mine' is no name known here; give"),
    ],
)  # fmt: skip
def test_what_a_row_lacks_is_named(tmp_path, row, reward, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=message):
        Jsonl(str(tmp_path / "a.jsonl"), reward).samples("all")[0]


@pytest.mark.parametrize(
    ("question", "are_shown"),
    [
        ("Of 24 apples 2 go. How many?", False),  # 2 and 4 stand there, and are no options
        ("How many? A. 2 B. 4", True),
        ("How many?\n(A) 2\n(B) 4", True),
        ("How many?\n(A) 24\n(B) 4", False),
    ],
)
def test_options_are_listed_unless_the_question_gives_them_with_their_letters(tmp_path, question, are_shown):
    row = PLAIN | {"question": question, "answer": "B", "options": ["2", "4"]}
    (tmp_path / "val.jsonl").write_text(json.dumps(row))
    asked = Jsonl(str(tmp_path), "multiple_choice").samples("val")[0].question
    assert asked == (question if are_shown else question + "\n(A) 2\n(B) 4")


def test_a_system_s_instructions_stand_before_the_question_of_every_form(folder: Path):
    system, user = "Think first.", "<image>What?"
    rows = (
        said("a") | {"conversations": [{"from": "system", "value": system}, *said("a")["conversations"]]},
        SWIFT | {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]},
        VERL | {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}],
                "images": ["images/1.png"]},
    )  # fmt: skip
    for row in rows:
        assert Jsonl(write(folder / "a.jsonl", row), "math").samples("train")[0].question == "Think first.\nWhat?"


def test_rows_whose_own_rewards_mix_words_and_positions_are_refused(folder: Path):
    words, box = said("3") | {"accu_reward_method": "default"}, said([1, 2, 30, 40]) | {"accu_reward_method": "iou"}
    for rows, message in (
        ([words, words, box], r"a.jsonl:3: its reward is box_iou, and the first row's is of words; give task_args.rew"),
        ([box, words], r"a.jsonl:2: its reward is math, and the first row's is of positions; give task_args.reward"),
    ):
        samples = Jsonl(write(folder / "a.jsonl", *rows)).samples("train")
        with pytest.raises(UserError, match=message):
            [samples[index] for index in range(len(rows))]
    both = Jsonl(write(folder / "a.jsonl", words, said("C") | {"accu_reward_method": "mcq"})).samples("train")
    assert [both[index].target.reward for index in range(2)] == ["math", "multiple_choice"]


def test_assistants_last_words_are_an_answer(folder: Path):
    row = {"messages": [*SWIFT["messages"], {"role": "assistant", "content": "a mug"}], "images": ["images/1.png"]}
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    other = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}],
        "images": "images/2.png",
    }
    adapter = Jsonl(write(folder / "a.jsonl", row, other), reward="exact_match")
    samples = adapter.samples("train")
    assert [adapter.reference_answer(samples[i]) for i in (0, 1)] == ["a mug", "b"]
    assert samples[1].question == "What?"


def test_parquet_rows_of_verl_are_read(folder: Path):
    rows = [{**VERL, "extra_info": {**VERL["extra_info"], "index": i}} for i in range(5)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "train.parquet", row_group_size=2)
    adapter = Jsonl(str(folder))
    assert adapter.reward_timeout_s is not None
    check_task(adapter)
    samples = adapter.samples("train")
    assert [samples[i].id for i in range(5)] == [f"train-{i}" for i in range(5)]
    assert samples[4].images[0].size == (100, 90)
    worker = RewardWorker(adapter)
    right, wrong = worker.score(samples[4], "0.5"), worker.score(samples[0], "2")
    assert right is not None and wrong is not None and (right.value, wrong.value) == (1, 0)
    saved = datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    saved.to_parquet(folder / "test.parquet")
    check_task(Jsonl(str(folder)), "test")


def test_text_alone_and_several_images(folder: Path):
    rows = [
        {"question": "1+1?", "answer": "2"},
        {"images": ["images/1.png", "images/2.png"], "question": "<image> and <image>: same?", "answer": "yes"},
    ]
    samples = Jsonl(write(folder / "a.jsonl", *rows), reward="exact_match", question="{question} Be brief.").samples(
        "train"
    )
    assert [len(samples[i].images) for i in (0, 1)] == [0, 2]
    assert samples[1].question == "and : same? Be brief."
    assert pickle.loads(pickle.dumps(samples[1])).images[1] == folder / "images/2.png"


def test_a_file_is_divided_by_ids_and_no_row_is_on_both_sides(folder: Path):
    rows = [{"id": f"r{i}", "question": f"{i}?", "answer": str(i)} for i in range(20)]
    path = write(folder / "a.jsonl", *rows)
    divided = Jsonl(path, "number", held_out=0.12)
    train, val = (set(divided.samples(split).ids) for split in ("train", "val"))  # type: ignore[union-attr]
    assert len(val) == math.ceil(0.12 * 20) and train | val == {row["id"] for row in rows} and not train & val
    check_task(divided, "val")
    assert [divided.samples("val")[i].question for i in range(3)] == [f"{i}?" for i in range(20) if f"r{i}" in val]
    random.Random(0).shuffle(rows)
    write(folder / "b.jsonl", *rows)
    again = Jsonl(str(folder / "b.jsonl"), "number", held_out=0.12, limit=2)
    assert set(again.samples("val").ids) < val and len(again.samples("val")) == 2  # type: ignore[union-attr]
    whole = Jsonl(path, "number")
    assert whole.samples("train").ids == whole.samples("all").ids == [f"r{i}" for i in range(20)]  # type: ignore[union-attr]
    numbered = Jsonl(write(folder / "c.jsonl", *[{"question": f"{i}?", "answer": "1"} for i in range(8)]), "number")
    assert list(numbered.samples("all").ids) == [f"all-{i}" for i in range(8)]  # type: ignore[union-attr]
    numbered.held_out = 0.25
    sides = [{one.split("-")[1] for one in numbered.samples(split).ids} for split in ("train", "val")]  # type: ignore[union-attr]
    assert [len(side) for side in sides] == [6, 2] and not sides[0] & sides[1]
    (folder / "m.yaml").write_text(
        "datasets:\n  - json_path: a.jsonl\n  - {json_path: a.jsonl, sampling_strategy: first:9}"
    )
    parts = Jsonl(str(folder / "m.yaml"), "number", held_out=0.3)
    sides = [{one.split("-")[2] for one in parts.samples(split).ids} for split in ("train", "val")]  # type: ignore[union-attr]
    assert all(sides) and not sides[0] & sides[1], "a row that is drawn twice is on one side"


@pytest.mark.parametrize(
    ("split", "held_out", "message"),
    [
        ("val", 0.0, "a.jsonl is one file, and none of its rows are held out as val. Give task_args.held_out=0.1"),
        (
            "banana",
            0.0,
            "has no split 'banana'; its splits: train, all, and with task_args.held_out val. Or give a fol",
        ),
        ("test", 0.5, "has no split 'test'; its splits: train and val"),
        ("all", 0.5, "has no split 'all'"),
        ("train", 1.0, "task_args.held_out is 1.0; accepted: a share of a file's rows, from 0 to below 1"),
        ("train", -0.1, "task_args.held_out is -0.1"),
    ],
)
def test_a_file_has_no_other_splits(folder: Path, split: str, held_out: float, message: str):
    with pytest.raises(UserError) as raised:
        Jsonl(write(folder / "a.jsonl", PLAIN, PLAIN), "number", held_out=held_out).samples(split)
    assert message in str(raised.value)
    with pytest.raises(UserError, match=r"held_out=0.5 divides one file; task_args.data is the folder"):
        Jsonl(str(folder), "number", held_out=0.5)


def test_data_root_is_where_images_lie(folder: Path):
    (folder / "rows").mkdir()
    write(folder / "rows/train.json", TRAJECTORY, TRAJECTORY | {"id": 7})
    with pytest.raises(UserError, match=r"images/1.png cannot be read"):
        check_task(Jsonl(str(folder / "rows"), "trajectory"))
    adapter = Jsonl(str(folder / "rows"), "trajectory", data_root=str(folder))
    check_task(adapter)
    assert adapter.samples("train").ids == ["train-0", "7"]  # type: ignore[union-attr]


def test_manifests_sample_as_they_say(folder: Path):
    (folder / "rows").mkdir()
    for name, count in (("a.json", 11), ("b.jsonl", 10), ("c.json", 9), ("d.jsonl", 3)):
        write(folder / "rows" / name, *[PLAIN | {"id": f"{name}{i}"} for i in range(count)])
    manifest = folder / "m.yaml"
    manifest.write_text(
        "data_root: .\ndatasets:\n"
        "  - json_path: rows/a.json\n    sampling_strategy: first:25%\n"
        "  - json_path: rows/b.jsonl\n    sampling_strategy: random:4\n"
        "  - json_path: rows/c.json\n    sampling_strategy: end:2\n"
        "  - json_path: rows/d.jsonl\n    data_root: .\n"
    )
    adapter = Jsonl(str(manifest), "number")
    check_task(adapter)
    ids = list(adapter.samples("train").ids)  # type: ignore[union-attr]
    assert ids[: math.ceil(11 * 0.25)] == [f"a-0-a.json{i}" for i in range(3)]
    assert ids[-5:] == ["c-2-c.json7", "c-2-c.json8", *(f"d-3-d.jsonl{i}" for i in range(3))]
    drawn = ids[3:-5]
    assert len(set(drawn)) == 4 and all(one.startswith("b-1-") for one in drawn)
    assert ids == list(Jsonl(str(manifest), "number").samples("train").ids)  # type: ignore[union-attr]
    assert ids != list(Jsonl(str(manifest), "number", seed=1).samples("train").ids)  # type: ignore[union-attr]
    assert len(Jsonl(str(manifest), "number", limit=4).samples("train")) == 4
    assert Jsonl(str(manifest), "number").samples("train")[0].images[0] == folder / "images/1.png"


def test_manifest_percentages_equal_vlm_r1s():
    from tasks._tables import _sampled

    rng = random.Random(0)
    for _ in range(500):
        count, percent = rng.randint(1, 50), rng.randint(0, 100)
        rows = list(range(count))
        number = math.ceil(percent * count / 100)
        assert list(_sampled(count, f"first:{percent}%", "", 0)) == rows[:number]
        assert list(_sampled(count, f"end:{percent}%", "", 0)) == rows[count - number :]
        drawn = list(_sampled(count, f"random:{percent}%", "", 0))
        assert len(drawn) == len(set(drawn)) == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: []", "has no list of datasets"),
        ("- a", "has no list of datasets"),
        ("datasets: [{json_path: a.jsonl, sampling: all}]", "dataset 1: unknown key 'sampling'"),
        ("datasets: [{path: a.jsonl}]", "has no json_path"),
        (
            "datasets: [{json_path: a.jsonl, sampling_strategy: 'last:3'}]",
            "sampling_strategy is 'last:3'; accepted: all, first:N",
        ),
        ("datasets: [{json_path: b.jsonl}]", "b.jsonl: there is no such file"),
        ("datasets: [{json_path: a.txt}]", "files of rows end in .jsonl, .json, .parquet"),
        ("datasets: [{", "cannot be read"),
    ],
)
def test_bad_manifests_say_what_is_accepted(folder: Path, text: str, message: str):
    write(folder / "a.jsonl", PLAIN)
    (folder / "m.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        Jsonl(str(folder / "m.yaml"), "number")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"text": "a"}], {}, "a.jsonl:1: no known form of row; its keys are text. Accepted: conversations (VLM-R1)"),
        ([PLAIN, {"question": "a"}], {}, "a.jsonl:2: not a row of the form question and answer"),
        ([PLAIN, CONVERSATION], {}, "a.jsonl:2: not a row of the form question and answer"),
        ([PLAIN | {"question": "<image><image>"}], {}, "a.jsonl:1: the question has 2 <image>, and the row 1 images"),
        ([PLAIN | {"question": " "}], {}, "the question is empty"),
        ([PLAIN | {"question": 3}], {}, "3 is no text"),
        ([PLAIN | {"answer": "many"}], {}, "the answer 'many' does not suit reward=number: it must hold one number"),
        ([PLAIN], {"reward": "box_iou"}, "does not suit reward=box_iou: it must be a box"),
        ([PLAIN], {"reward": "trajectory"}, "it must be two points or more"),
        ([PLAIN], {"reward": "detections"}, "it must be a list of"),
        ([PLAIN | {"answer": [{"bbox_2d": [9, 9, 1, 1], "label": "a"}]}], {"reward": "detections"}, "must be a list"),
        ([PLAIN | {"answer": " "}], {"reward": "exact_match"}, "does not suit reward=exact_match: it is empty"),
        ([PLAIN | {"answer": []}], {"reward": "anls"}, "does not suit reward=anls: it is empty"),
        ([PLAIN | {"answer": {"a": 1}}], {"reward": "math"}, "it must be text, a number or a list of them"),
        ([PLAIN | {"answer": "E", "options": ["1", "2"]}], {"reward": "multiple_choice"}, "'E' is none of the options"),
        *(([PLAIN | {"answer": "A", "options": options}], {"reward": "multiple_choice"},
           f"a.jsonl:1: the options are {options!r}; they must be a list of at most 26 texts or numbers, or {{")
          for options in ("red, blue", {"0": "red", "1": "blue"}, {"A": "red", "C": "blue"}, [["red"]], ["red", None],
                          [True, False], "{'a': 1}", "[1", 3, list(map(str, range(27))))),
        *(([PLAIN | {"answer": answer, "options": ["2", "4"]}], {"reward": "multiple_choice"},
           f"a.jsonl:1: the answer {answer!r} does not suit reward=multiple_choice: it must be one text: an option's l")
          for answer in (1, 4.0, ["A", "B"], [1])),
        ([PLAIN | {"answer": "C", "options": ["A", "C", "D", "K"]}], {"reward": "multiple_choice"},
         "the answer 'C' may be any of (B), (C), of the options ['A', 'C', 'D', 'K']. Give its letter in round br"),
        ([PLAIN | {"answer": "2", "options": ["2", "4", "2"]}], {"reward": "multiple_choice"}, "any of (A), (C), of"),
        *(([PLAIN, PLAIN | {"answer": answer}], {"reward": "exact_match"},
           f"a.jsonl:2: the answer {answer!r} does not suit reward=exact_match: {message} is no number")
          for answer, message in ((math.nan, "nan"), ([1, math.inf], "inf"))),
        ([PLAIN | {"answer": "yellow"}], {"reward": "multiple_choice"},
         "the answer 'yellow' is no letter, and the row has no options. Give them: \"options\": ["),
        ([PLAIN], {"reward": None}, "the row does not say how it is scored; give task_args.reward: exact_match"),
        ([PLAIN], {"reward": "bleu"}, "task_args.reward is 'bleu'; accepted: exact_match"),
        ([PLAIN], {"data_root": "/none"}, "task_args.data_root is '/none', which is no folder"),
        ([PLAIN], {"question": "?"}, "it must hold {question}"),
        ([PLAIN], {"limit": 0}, "task_args.limit is 0"),
        ([CONVERSATION | {"conversations": [{"from": "human"}]}], {}, "a.jsonl:1: not of the form conversations"),
        ([CONVERSATION | {"conversations": [ASKED]}], {}, "a.jsonl:1: not of the form conversations"),
        ([CONVERSATION, CONVERSATION | {"conversations": [*CONVERSATION["conversations"]] * 2}], {},
         "a.jsonl:2: its turns are human, gpt, human, gpt; accepted: one question, an answer to it, and a system's"),
        ([said({"a": 1})], {"reward": "exact_match"}, "it must be text, a number or a list of them"),
        ([said(math.nan)], {"reward": "exact_match"}, "a.jsonl:1: the answer nan does not suit reward=exact_match"),
        ([SWIFT | {"messages": [SWIFT["messages"][1]] * 2}], {}, "a.jsonl:1: its turns are user, user; accepted"),
        ([SWIFT | {"messages": SWIFT["messages"][::-1]}], {}, "a.jsonl:1: its turns are user, system; accepted"),
        ([SWIFT | {"messages": SWIFT["messages"][:1]}], {}, "a.jsonl:1: its turns are system; accepted"),
        ([VERL | {"images": ["images/1.png"], "prompt": [*VERL["prompt"], {"role": "tool", "content": "3"}]}], {},
         "a.jsonl:1: its turns are user, tool; accepted"),
    ],
)  # fmt: skip
def test_bad_rows_and_arguments_say_what_is_accepted(folder: Path, rows, arguments, message: str):
    with pytest.raises(UserError) as raised:
        samples = Jsonl(write(folder / "a.jsonl", *rows), **{"reward": "number", **arguments}).samples("train")
        for index in range(len(samples)):
            samples[index]
    assert message in str(raised.value)


def test_an_empty_answer_among_others_is_not_to_be_earned(folder: Path):
    path = write(folder / "a.jsonl", PLAIN | {"answer": ["", "4"]})
    task = Jsonl(path, "exact_match")
    sample = task.samples("train")[0]
    assert (task.reward(sample, "").value, task.reward(sample, "4").value) == (0, 1)


def test_files_that_are_none_say_so(folder: Path):
    for name, content, message in (
        ("a.jsonl", "{", "a.jsonl:1: not a JSON object"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: not a JSON object"),
        ("a.jsonl", "\n\n[1]\n", "a.jsonl:3: not a JSON object, but a list"),
        ("a.jsonl", "", "it holds no rows"),
        ("a.json", "{}", "holds a dict, where a JSON array of rows is expected"),
        ("a.json", "[1]", "a.json, row 1: not a JSON object, but a int"),
        ("a.json", "[", "not a JSON array"),
        ("a.parquet", "no", "not a parquet file"),
        ("a.txt", "no", "no file in .jsonl, .json, .parquet, .yaml"),
    ):
        (folder / name).write_text(content)
        with pytest.raises(UserError) as raised:
            Jsonl(str(folder / name), "number")
        assert message in str(raised.value)
    with pytest.raises(UserError, match=r"has no file test.jsonl; splits there: a, train"):
        write(folder / "train.jsonl", PLAIN)
        Jsonl(str(folder), "number").samples("test")
    with pytest.raises(UserError, match="task jsonl has no data"):
        find_task("jsonl", {})


def test_only_offsets_of_lines_are_kept(folder: Path):
    path = folder / "big.jsonl"
    write(path, *[PLAIN | {"id": f"é{i}", "note": "x" * (i % 7)} for i in range(500)])
    path.write_text(path.read_text().replace("\n", "\n\n", 3))
    (part,) = open_parts(path, None, 0)
    order = list(range(500))
    random.Random(0).shuffle(order)
    assert all(part.table.row(i)["id"] == f"é{i}" for i in order)
    assert not any(isinstance(value, list) for value in vars(part.table).values())


GOLDS: dict[str, Any] = {
    "exact_match": ["yes"], "vqa_accuracy": ["yes"] * 10, "anls": ["invoice 7"], "relaxed_accuracy": ["12"],
    "number": ["7"], "multiple_choice": ["B"], "box_iou": (1.0, 2.0, 30.0, 40.0), "points": (1.0, 2.0, 30.0, 40.0),
    "trajectory": [(1.0, 2.0), (30.0, 4.0)], "detections": [((1.0, 2.0, 30.0, 40.0), "cup")],
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(max_size=60), st.text('[]{}(),:0123456789. yesBinvoclabe_2d"-', max_size=80)))
def test_any_text_has_a_reward_from_0_to_1(text: str):
    for name, gold in GOLDS.items():
        assert 0 <= REWARDS[name].score(text, Target(gold, (), name)) <= 1, name


def test_rewards_cannot_be_raised_by_listing():
    box = Target(GOLDS["box_iou"], (), "")
    every = [[x, y, x + 29, y + 38] for x in range(0, 5) for y in range(0, 5)]
    assert REWARDS["box_iou"].score(json.dumps(every), box) < 0.95
    assert REWARDS["box_iou"].score("[0, 0, 100, 90]", box) < 0.15
    grid = json.dumps([[x, y] for x in range(0, 100, 10) for y in range(0, 90, 10)])
    assert REWARDS["points"].score(grid, box) < 0.2
    things = [{"bbox_2d": box, "label": "cup"} for box in every]
    assert REWARDS["detections"].score(json.dumps(things), Target(GOLDS["detections"], (), "")) < 0.1
    path = Target(GOLDS["trajectory"], (), "")
    assert REWARDS["trajectory"].score(grid, path) == 0
    assert REWARDS["trajectory"].score("[[1, 2], [1, 2], [30, 4], [30, 4]]", path) == 1
    for name in ("exact_match", "vqa_accuracy", "number", "multiple_choice", "relaxed_accuracy"):
        gold = Target(GOLDS[name], (), "")
        assert REWARDS[name].score("yes no yes no A B C 1 12 7 8", gold) == 0, name


def test_rewards_cannot_be_raised_by_padding_or_by_answers_of_nothing():
    name = Target(["cat"], (), "")
    # The official ANLS counts white space in the length alone: 1 - 2 / 10 for the padded text
    assert REWARDS["anls"].score("ca       b", name) <= REWARDS["anls"].score("cab", name) == pytest.approx(2 / 3)
    letter = Target(["A"], (), "")  # an article, of which the normalisation of VQA leaves nothing
    assert [REWARDS["vqa_accuracy"].score(answer, letter) for answer in ("A", "", "the", "?")] == [1, 0, 0, 0]


def test_the_reference_of_several_people_is_what_most_of_them_said():
    people = Target(["no", "yes", "yes", "maybe"], (), "")
    reference = REWARDS["vqa_accuracy"].reference(people)
    assert reference == "yes" and REWARDS["vqa_accuracy"].score(reference, people) == 1
    assert 0 < REWARDS["vqa_accuracy"].score("no", people) < 1


@pytest.mark.parametrize("key", ["imge", "Image", "imgaes", "img", "imgs", "image_path", "img_paths", "IMAGES"])
@pytest.mark.parametrize("row", [PLAIN, CONVERSATION, SWIFT, VERL])
def test_a_misspelt_image_is_not_a_row_of_text(folder: Path, key: str, row: dict[str, Any]):
    images = row.get("images", ["images/1.png"])
    row = {name: value for name, value in row.items() if name not in ("image", "images")} | {key: "images/1.png"}
    row = json.loads(json.dumps(row).replace("<image>", ""))
    with pytest.raises(UserError, match=rf"a.jsonl:1: the row has no image or images, but '{key}'. Rename it"):
        Jsonl(write(folder / "a.jsonl", row), "exact_match")
    for more in ({"images": []}, {"image": None}, {"images": images if isinstance(images[0], str) else "images/1.png"}):
        assert len(Jsonl(write(folder / "a.jsonl", row | more), "exact_match").samples("train")) == 1


def test_other_keys_than_those_that_are_known_may_be_there(folder: Path):
    row = {"question": "a", "answer": "b", "image_id": "3", "image_width": 640, "image_caption": "x", "usage": "y"}
    assert len(Jsonl(write(folder / "a.jsonl", row), "exact_match").samples("train")[0].images) == 0


def test_forms_are_told_apart_by_keys():
    rows = (PLAIN, CONVERSATION, SWIFT, VERL, REC, {"query": "a", "response": "b"}, {"a": 1}, {"question": "a"})
    forms = ["question and answer", "conversations (VLM-R1)", "messages (ms-swift)", "verl"]
    assert [form_of(row) for row in rows] == [*forms, forms[0], forms[0], None, None]
