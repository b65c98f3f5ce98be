"""GSM8K, Geometry3K and MathVista: their published files, rewards and metrics."""

import io
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_scripts import geometry3k, gsm8k, mathvista
from data_scripts.writing import run_script
from tasks.geometry3k import Geometry3K
from tasks.gsm8k import GSM8K
from tasks.mathvista import MathVista, Problem, official_hit, official_normalised
from vlm_grpo.common.errors import UserError
from vlm_grpo.evaluate import main as evaluate
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task import Reward, Sample, check_task, find_task, score
from vlm_grpo.task.check import JUNK_ANSWERS

SOLUTION = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


def png(size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(file, "png")
    return file.getvalue()


def run(script: Any, *arguments: str) -> int:
    return run_script(script.__doc__, script.OPTIONS, script.convert, arguments)


# ---- GSM8K ----


@pytest.fixture
def gsm8k_folder(tmp_path: Path) -> Path:
    source = tmp_path / "data"
    source.mkdir()
    rows = [{"question": f"How many clips, {i}?", "answer": SOLUTION} for i in range(3)]
    rows += [{"question": "In dollars?", "answer": "He earns <<2000*3=6000>>6000 - 7.\n#### 5,993"}]
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source


def test_gsm8k_is_read_from_its_files(gsm8k_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(gsm8k, f"out={tmp_path / 'out'}", f"data={gsm8k_folder}") == 0
    said = capsys.readouterr().out
    assert "train: 4 problems (official 7,473, DIFFERS)" in said and "test: 4 problems (official 1,319" in said
    adapter = GSM8K(str(tmp_path / "out"))
    check_task(adapter, "train")
    sample = adapter.samples("test")[0]
    assert (sample.id, list(sample.images), adapter.reference_answer(sample)) == ("test-0", [], "72")
    assert adapter.reference_thought(sample).startswith("Natalia sold 48/2 = 24 clips in May.\n")
    assert adapter.reward(adapter.samples("train")[3], "$5993.00 a year").value == 1
    assert run(gsm8k, f"out={tmp_path / 'one'}", f"data={gsm8k_folder / 'test.jsonl'}", "--limit", "2") == 0
    assert "test: 2 problems (official 1,319, limit=2)" in capsys.readouterr().out


def test_gsm8k_is_read_from_parquet_and_saved_rows(tmp_path: Path):
    rows = datasets.Dataset.from_list([{"question": "q", "answer": SOLUTION}] * 2)
    rows.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    rows.save_to_disk(tmp_path / "saved")
    for source in ("test-00000-of-00001.parquet", "saved"):
        assert run(gsm8k, f"out={tmp_path / 'out'}", f"data={tmp_path / source}", "split=test") == 0
        assert len(GSM8K(str(tmp_path / "out")).samples("test")) == 2


def test_gsm8k_rows_without_a_final_number_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "q", "answer": "about 7"}) + "\n")
    assert run(gsm8k, f"out={tmp_path / 'out'}", f"data={tmp_path}", "split=train") == 2
    assert "1 rows without a question, or a solution that ends in #### and a number: train-0" in capsys.readouterr().err
    assert not (tmp_path / "out/train.jsonl").exists()
    assert run(gsm8k, f"data={tmp_path}") == 2
    assert "out=… is missing" in capsys.readouterr().err


def test_gsm8k_rewards_the_number_and_nothing_else():
    adapter = GSM8K("sums")
    check_task(adapter, "train")
    sample = Sample("a", [], "q", SOLUTION)
    hits = ("72", "72.0", "$72", "#### 72", "\\boxed{72}", "The answer is 72 clips.", "144/2")
    misses = ("71", "7 2", "72 or 73", "70, 71, 72, 73", "72.5", "seventy", "#### 72 #### 73"[::-1], *JUNK_ANSWERS)
    assert [adapter.reward(sample, answer).value for answer in hits] == [1] * len(hits)
    assert [adapter.reward(sample, answer).value for answer in misses] == [0] * len(misses)
    rewards = [adapter.reward(sample, answer) for answer in ("72", "71", "none", "72")]
    assert adapter.metrics([sample] * 4, [""] * 4, rewards) == {"reward": 0.5, "accuracy": 0.5, "parsed": 0.75}
    assert adapter.normalised(sample, "72.0 clips") == adapter.normalised(sample, "#### 72") == "72"


@pytest.mark.slow
def test_sums_are_right_and_splits_are_disjoint():
    adapter = find_task("gsm8k", {}, demo=True)
    seen = {}
    for split in ("train", "val", "test"):
        samples = adapter.samples(split)
        seen[split] = {samples[i].question for i in range(256)}
        for sample in (samples[i] for i in range(50)):
            a, b = (int(word) for word in sample.question.rstrip("?").split(" and "))
            assert adapter.reference_answer(sample) == str(a + b)
    assert not seen["train"] & seen["val"] and not seen["train"] & seen["test"] and not seen["val"] & seen["test"]
    with pytest.raises(UserError, match="no split 'dev'; they have: train, val, test"):
        adapter.samples("dev")


def test_bad_arguments_name_what_is_accepted(tmp_path: Path):
    for task in (GSM8K, Geometry3K, MathVista):
        with pytest.raises(UserError, match="has no data"):
            task()
        with pytest.raises(UserError, match=r"task_args.limit is 0"):
            task("sums", limit=0)
        with pytest.raises(UserError, match="no folder"):
            task(str(tmp_path / "none")).samples("train")
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "q"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:1: the key 'answer' is missing"):
        GSM8K(str(tmp_path)).samples("train")


# ---- Geometry3K ----


@pytest.fixture
def geometry_folder(tmp_path: Path) -> Path:
    problems = [("Find x.", ["6 \\sqrt { 2 }", "10", "12", "20"], "A"), ("Find y.", ["30", "60", "90", "120"], "C")]
    for split, first in (("train", 0), ("val", 2101), ("test", 2401)):
        for number, (text, choices, answer) in enumerate(problems, start=first):
            folder = tmp_path / "geometry3k" / split / str(number)
            folder.mkdir(parents=True)
            record = {"problem_text": text, "annotat_text": text, "choices": choices, "answer": answer, "id": number}
            (folder / "data.json").write_text(json.dumps(record))
            (folder / "img_diagram.png").write_bytes(png())
    return tmp_path / "geometry3k"


def test_geometry3k_is_read_from_the_original_folder(geometry_folder: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert run(geometry3k, f"out={out}", f"data={geometry_folder}") == 0
    assert "train: 2 problems (official 2,101, DIFFERS)" in capsys.readouterr().out
    adapter = Geometry3K(str(out))
    check_task(adapter, "val")
    sample = adapter.samples("train")[0]
    assert sample.question == "Find x.\n(A) 6 \\sqrt { 2 }\n(B) 10\n(C) 12\n(D) 20"
    for answer, value in (("A", 1), ("(B)", 0), ("$6\\sqrt{2}$", 1), ("\\sqrt{72}", 1), ("A or B", 0), ("A B C D", 0)):
        assert adapter.reward(sample, answer).value == value, answer
    free = Geometry3K(str(out), choices=False)
    check_task(free, "test")
    sample = free.samples("train")[0]
    assert sample.question == "Find x."
    assert [free.reward(sample, answer).value for answer in ("A", "8.485", "6\\sqrt{2}", "\\boxed{\\sqrt{72}}")] == [
        0,
        0,
        1,
        1,
    ]


def test_geometry3k_is_read_from_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    rows = [
        {"images": [{"bytes": png((20 + i, 30)), "path": None}], "problem": "<image>Find x.", "answer": str(i)}
        for i in (1, 2)
    ]
    features = datasets.Features(
        {
            "images": datasets.Sequence(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    saved = datasets.Dataset.from_list(rows, features)
    saved.to_parquet(tmp_path / "validation-00000-of-00001.parquet")
    assert run(geometry3k, f"out={tmp_path / 'out'}", f"data={tmp_path}", "split=val") == 0
    adapter = Geometry3K(str(tmp_path / "out"))
    check_task(adapter, "val")
    assert adapter.samples("val")[1].question == "Find x."
    saved.save_to_disk(tmp_path / "saved")
    assert run(geometry3k, f"out={tmp_path / 'disk'}", f"data={tmp_path / 'saved'}", "split=val") == 0
    assert (tmp_path / "disk/val.jsonl").read_text() == (tmp_path / "out/val.jsonl").read_text()
    datasets.Dataset.from_list([{**rows[0], "answer": None}], features).to_parquet(tmp_path / "test.parquet")
    assert run(geometry3k, f"out={tmp_path / 'out'}", f"data={tmp_path / 'test.parquet'}", "split=test") == 2
    assert f"1 problems without an answer: test-0 of {tmp_path / 'test.parquet'}" in capsys.readouterr().err
    # A row that has no image, which is not to be looked at where the limit is reached
    stream = datasets.Dataset.from_list([rows[0], {**rows[1], "images": []}], features).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    assert run(geometry3k, f"out={tmp_path / 'hub'}", "data=hiyouga/geometry3k", "split=val", "limit=1") == 0
    assert (tmp_path / "out/val.jsonl").read_text().startswith((tmp_path / "hub/val.jsonl").read_text())
    assert [path.name for path in (tmp_path / "hub/images").iterdir()] == ["val-0.png"]
    monkeypatch.setattr("tasks.geometry3k.load_hub", lambda name, config, split, advice: {"validation": saved}[split])
    hub = Geometry3K("hub")
    check_task(hub, "val")
    assert [hub.samples("val")[i].images[0].size for i in (0, 1)] == [(21, 30), (22, 30)]


def test_the_hubs_rows_show_their_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    image, texts = datasets.Sequence(datasets.Image()), datasets.Sequence(datasets.Value("string"))
    text = datasets.Value("string")
    features = datasets.Features({"images": image, "problem": text, "answer": text, "choices": texts})
    row = {"images": [{"bytes": png(), "path": None}], "problem": "<image>Find x.", "answer": "6 \\sqrt { 2 }"}
    rows = [row | {"choices": ["10", "6 \\sqrt { 2 }", "12"]}, row | {"choices": ["10", "11", "12"]}]
    monkeypatch.setattr("tasks.geometry3k.load_hub", lambda *_: datasets.Dataset.from_list(rows, features))
    shown, free = Geometry3K("hub", limit=1), Geometry3K("hub", limit=1, choices=False)
    for adapter in (shown, free):
        check_task(adapter, "val")
    sample = shown.samples("val")[0]
    assert sample.question == "Find x.\n(A) 10\n(B) 6 \\sqrt { 2 }\n(C) 12"
    assert [shown.reward(sample, answer).value for answer in ("B", "A", "6\\sqrt{2}")] == [1, 0, 1]
    assert free.samples("val")[0].question == "Find x."
    with pytest.raises(UserError, match=r"split 'val', row 1: it cannot .*the answer .* is none of the choices"):
        Geometry3K("hub").samples("val")[1]
    for count, code in ((1, 0), (2, 2)):
        path = tmp_path / f"{count}.parquet"
        datasets.Dataset.from_list(rows[:count], features).to_parquet(path)
        assert run(geometry3k, f"out={tmp_path / str(count)}", f"data={path}", "split=val") == code
    assert "1 answers that are none of the choices: val-1" in capsys.readouterr().err
    assert Geometry3K(str(tmp_path / "1")).samples("val")[0].question == sample.question


def test_geometry3k_files_of_another_form_are_errors(geometry_folder: Path, tmp_path: Path, capsys):
    (geometry_folder / "val/2101/data.json").write_text('{"choices": []}')
    assert run(geometry3k, f"out={tmp_path / 'o'}", f"data={geometry_folder}") == 2
    assert "val/2101/data.json: not of the form of Geometry3K" in capsys.readouterr().err
    (geometry_folder / "val/2101/data.json").write_text('{"problem_text": "?", "choices": ["1", "2"], "answer": ""}')
    assert run(geometry3k, f"out={tmp_path / 'o'}", f"data={geometry_folder}") == 2
    assert "val/2101/data.json: not of the form of Geometry3K" in capsys.readouterr().err
    (geometry_folder / "train/1/img_diagram.png").unlink()
    assert run(geometry3k, f"out={tmp_path / 'o'}", f"data={geometry_folder}", "split=train") == 2
    assert "1 images missing" in capsys.readouterr().err
    assert not list((tmp_path / "o").glob("*.jsonl*"))


@pytest.mark.slow
def test_an_endless_computation_is_wrong(monkeypatch: pytest.MonkeyPatch):
    from tasks.geometry3k import Solution

    adapter = Geometry3K("x")
    monkeypatch.setattr(Geometry3K, "reward_timeout_s", 6.0)
    worker = RewardWorker(adapter)
    sample = Sample("a", [], "q", Solution("5"))
    reward = worker.score(sample, "9^{9^{9^{9^9}}}")
    # Without a reward it would enter no mean, and the accuracy would rise
    assert reward == adapter.reward(sample, "7") == Reward(0.0, {"accuracy": 0.0})
    right = worker.score(sample, "$\\frac{10}{2}$")
    assert right is not None and right.value == 1


# ---- MathVista ----

METADATA = {
    "category": "math-targeted-vqa", "context": "geometry diagram", "grade": "high school", "img_height": 30,
    "img_width": 40, "language": "english", "skills": ["geometry reasoning", "algebraic reasoning"],
    "source": "Geometry3K", "split": "testmini", "task": "geometry problem solving",
}  # fmt: skip
FREE = {"question_type": "free_form", "choices": None, "unit": None, "metadata": METADATA, "query": None}
RECORDS = [
    FREE | {"question": "How many?", "precision": None, "answer": "4", "answer_type": "integer"},
    FREE | {"question": "How long?", "precision": 1.0, "answer": "1.2", "answer_type": "float", "unit": "m"},
    FREE | {"question": "Which two?", "precision": None, "answer": "[0, 4]", "answer_type": "list"},
    FREE
    | {"question": "Which?", "question_type": "multi_choice", "choices": ["145°", "135°", "No"], "precision": None,
       "answer": "135°", "answer_type": "text", "metadata": METADATA | {"skills": ["statistical reasoning"]}},
]  # fmt: skip


@pytest.fixture
def mathvista_task(tmp_path: Path, capsys) -> MathVista:
    (tmp_path / "images").mkdir()
    records = {}
    for number, record in enumerate(RECORDS, start=1):
        (tmp_path / f"images/{number}.jpg").write_bytes(png())
        records[str(number)] = {"pid": str(number), "image": f"images/{number}.jpg", **record}
    (tmp_path / "testmini.json").write_text(json.dumps(records))
    assert run(mathvista, f"out={tmp_path / 'out'}", f"data={tmp_path / 'testmini.json'}", f"images={tmp_path}") == 0
    assert "testmini: 4 problems (official 1,000, DIFFERS)" in capsys.readouterr().out
    return MathVista(str(tmp_path / "out"))


def test_mathvista_is_read_from_its_json(mathvista_task: MathVista):
    check_task(mathvista_task, "testmini")
    samples = mathvista_task.samples("testmini")
    assert samples.ids == ["1", "2", "3", "4"]  # type: ignore[union-attr]
    assert samples[1].question == "How long? (Unit: m)"
    assert samples[3].question == "Which?\nChoices:\n(A) 145°\n(B) 135°\n(C) No"


def test_mathvistas_records_of_another_form_are_named(tmp_path: Path, capsys):
    (tmp_path / "1.jpg").write_bytes(png())
    good = {"image": "1.jpg", **RECORDS[0]}
    for bad in ({"image": "1.jpg"}, {**RECORDS[0]}, [1]):
        (tmp_path / "testmini.json").write_text(json.dumps({"1": good, "2": bad}))
        assert run(mathvista, f"out={tmp_path / 'o'}", f"data={tmp_path / 'testmini.json'}", f"images={tmp_path}") == 2
        assert "testmini.json, row 1: not of the form of MathVista: " in capsys.readouterr().err


def test_mathvista_is_read_from_parquet(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {
            **record,
            "pid": str(i),
            "image": f"images/{i}.jpg",
            "decoded_image": {"bytes": png(), "path": None},
            "query": "Hint: Q",
        }
        for i, record in enumerate(RECORDS)
    ]
    rows.append({**rows[0], "pid": "9", "answer": ""})
    saved = datasets.Dataset.from_list(rows).cast_column("decoded_image", datasets.Image())
    for split in ("testmini", "test"):
        saved.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    assert run(mathvista, f"out={tmp_path / 'out'}", f"data={tmp_path}", "split=testmini") == 2
    assert "1 problems of testmini without an answer: 9 of " in capsys.readouterr().err
    assert run(mathvista, f"out={tmp_path / 'out'}", f"data={tmp_path}", "split=test") == 0
    assert "1 of them without an answer" in capsys.readouterr().out
    adapter = MathVista(str(tmp_path / "out"), limit=4)
    check_task(adapter, "test")
    assert adapter.samples("test")[0].question == "Hint: Q"
    unpublished = MathVista(str(tmp_path / "out")).samples("test")[4]
    assert score(adapter, unpublished, "4") is None
    with pytest.raises(UserError, match="sample '9' has no reference answer"):
        adapter.reference_answer(unpublished)
    monkeypatch.setattr("tasks.mathvista.load_hub", lambda *a: saved)
    check_task(MathVista("hub", limit=4), "testmini")


def test_no_sample_of_the_hub_holds_its_decoded_images(monkeypatch: pytest.MonkeyPatch):
    stored = [{"bytes": png((20, 30)), "path": None}, {"bytes": png((21, 30)), "path": None}]
    of_mathvista = [{**RECORDS[0], "pid": "7", "decoded_image": stored[1], "image": "images/7.jpg"}]
    vista = datasets.Dataset.from_list(of_mathvista).cast_column("decoded_image", datasets.Image())
    monkeypatch.setattr("tasks.mathvista.load_hub", lambda *_: vista)
    of_geometry = [{"images": stored, "problem": "Find x.", "answer": "7"}]
    features = {"images": datasets.Sequence(datasets.Image())}
    features |= {name: datasets.Value("string") for name in ("problem", "answer")}
    geometry = datasets.Dataset.from_list(of_geometry, datasets.Features(features))
    monkeypatch.setattr("tasks.geometry3k.load_hub", lambda *_: geometry)
    for task, sizes in ((MathVista("hub"), [(21, 30)]), (Geometry3K("hub"), [(20, 30), (21, 30)])):
        [sample] = task.samples("testmini")
        assert [image.size for image in sample.images] == sizes and len(sample.images) == len(sizes)
        assert sample.images[0] is not sample.images[0], "each decoded anew"


def test_mathvista_answers_without_a_published_reference_are_written_and_not_scored(mathvista_task: MathVista):
    folder = Path(mathvista_task.data)
    rows = [json.loads(line) for line in (folder / "testmini.jsonl").read_text().splitlines()]
    for index, hidden in enumerate(("", None, "", "")):
        rows[index]["answer"] = hidden
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "answers.jsonl").write_text("\n".join(json.dumps({"id": row["id"], "answer": "4"}) for row in rows))
    out = folder / "evaluated"
    args = f"task_args={{data: {folder}}}"
    evaluate(["task=mathvista", args, "split=test", f"predictions={folder / 'answers.jsonl'}", f"output_dir={out}"])
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["num_samples"], metrics["num_without_reward"], metrics["num_missing"]) == (0, 4, 0)
    assert "accuracy" not in metrics and metrics["intervals"] == {}
    written = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answer"], row["reward"]) for row in written] == [(row["id"], "4", None) for row in rows]
    assert [row["value"] for row in json.loads((out / "summary.json").read_text())["rows"]] == [None]


def test_mathvista_rewards_by_type(mathvista_task: MathVista):
    integer, decimal, listed, choice = (mathvista_task.samples("testmini")[i] for i in range(4))
    for sample, answer, correct, official in (
        (integer, "4", 1, 1),
        (integer, "The answer is 4.", 1, 1),
        (integer, "4.7", 0, 1),  # the official script cuts decimals
        (integer, "3, 4", 1, 1),
        (integer, "5", 0, 0),
        (decimal, "1.2", 1, 1),
        (decimal, "1.23 m", 1, 1),
        (decimal, "1.3", 0, 0),
        (listed, "[0, 4]", 1, 1),
        (listed, "[0,4]", 1, 0),  # the official script compares lists as text
        (listed, "[0, 4, 5]", 0, 0),
        (listed, "0, 4", 0, 0),
        (choice, "B", 1, 1),
        (choice, "(B) 135°", 1, 1),
        (choice, "135°", 1, 1),
        (choice, "135 degrees, I think", 1, 1),
        (choice, "A", 0, 0),
        (choice, "A or B", 0, 0),
        (choice, "135!", 1, 1),
        (choice, "I35°", 0, 1),  # the option of least edit distance
        (choice, "", 0, 0),
    ):
        reward = mathvista_task.reward(sample, answer)
        assert (reward.value, reward.parts["accuracy"]) == (correct, official), answer


def test_mathvista_metrics_by_group(mathvista_task: MathVista):
    samples = [mathvista_task.samples("testmini")[i] for i in range(4)]
    answers = ["4", "9", "[0, 4]", "A"]
    metrics = mathvista_task.metrics(
        samples, answers, [mathvista_task.reward(s, a) for s, a in zip(samples, answers, strict=True)]
    )
    assert metrics["accuracy"] == metrics["correct"] == 0.5
    assert metrics["accuracy/question_type=free_form"] == pytest.approx(2 / 3)
    assert metrics["accuracy/question_type=multi_choice"] == 0
    assert metrics["accuracy/skills=algebraic reasoning"] == pytest.approx(2 / 3)
    assert metrics["accuracy/skills=statistical reasoning"] == 0
    assert metrics["accuracy/task=geometry problem solving"] == 0.5


def lev(a: str, b: str) -> int:
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
    return table[len(a), len(b)]


@pytest.mark.slow
def test_official_normalisation_equals_the_script_written_out():
    """What calculate_score.py does to a clean extraction, in its own order of steps."""
    rng = random.Random(0)
    letters_compared = set()
    for _ in range(400):
        choices = tuple(dict.fromkeys("".join(rng.choices("xyzuvD", k=rng.randint(1, 6))) for _ in range(4)))
        text = rng.choice([rng.choice("ABCDxyz"), *choices, "".join(rng.choices("xyzuv", k=4))])
        problem = Problem("multi_choice", "text", choices[0], choices, 0, ())
        letters = "ABCD"[: len(choices)]
        expected = (
            choices[letters.index(text)] if text in letters else min(choices, key=lambda choice: lev(text, choice))
        )
        assert official_normalised(problem, text) == expected, (text, choices)
        letters_compared |= {text} & {*"ABCDxyz"}
        value, places = round(rng.uniform(-500, 500), rng.randint(0, 4)), rng.randint(0, 3)
        assert official_normalised(Problem("free_form", "integer", "", (), 0, ()), str(value)) == str(int(float(value)))
        assert official_normalised(Problem("free_form", "float", "", (), places, ()), str(value)) == str(
            round(value, places)
        )
    assert letters_compared == {*"ABCDxyz"}


def test_the_official_metric_reads_no_fractions():
    whole, decimal = (Problem("free_form", kind, "0", (), 1, ()) for kind in ("integer", "float"))
    for text in ("4/5", "It is 4 / 5.", "\\frac{4}{5}", "$\\dfrac{4}{5}$"):
        assert official_normalised(whole, text) is official_normalised(decimal, text) is None, text
    assert official_normalised(whole, "half of 1/2 a dozen is 3") == "3"
    assert official_normalised(decimal, "0.8") == "0.8"


texts = st.one_of(st.text(max_size=50), st.text("ABC()[]0123456789.,-e° \\{}nan", max_size=50))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(texts)
def test_any_text_has_a_mathvista_reward_between_0_and_1(text: str):
    for kind, answer_type, answer, choices in (
        ("multi_choice", "text", "b", ("a", "b", "c 2")),
        ("free_form", "integer", "4", ()),
        ("free_form", "float", "1.25", ()),
        ("free_form", "list", "[1, 2]", ()),
        ("free_form", "text", "yes", ()),
    ):
        sample = Sample("a", [], "q", Problem(kind, answer_type, answer, choices, 2, ()))
        adapter = MathVista("x")
        assert adapter.reward(sample, text).value in (0.0, 1.0)
        assert official_hit(sample.target, text) in (True, False)
        adapter.normalised(sample, text)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_a_gsm8k_reward(text: str):
    reward = GSM8K("sums").reward(Sample("a", [], "q", "#### 7"), text)
    assert reward.value in (0.0, 1.0) and Fraction(reward.value) <= 1


@pytest.mark.slow
def test_any_text_has_a_geometry3k_reward_or_none():
    from tasks.geometry3k import Solution

    adapter = Geometry3K("x")
    worker = RewardWorker(adapter)
    rng = random.Random(0)
    pieces = [
        "\\frac",
        "{",
        "}",
        "\\sqrt",
        "^",
        "_",
        "(",
        ")",
        "[",
        "]",
        "x",
        "1",
        "2",
        "+",
        "-",
        "\\pi",
        "$",
        ",",
        "=",
        " ",
        "\\",
        "A",
    ]
    sample = Sample("a", [], "q", Solution("2 \\sqrt{3}"))
    chosen = Sample("b", [], "q", Solution("2", ("1", "2", "3"), 1))
    for _ in range(120):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        for one in (sample, chosen):
            reward = worker.score(one, text)
            assert reward is None or reward.value in (0.0, 1.0), text
        adapter.normalised(chosen, text)
    assert [worker.score(sample, junk).value for junk in JUNK_ANSWERS] == [0.0] * len(JUNK_ANSWERS)  # type: ignore[union-attr]
