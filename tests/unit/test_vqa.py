"""Tasks of visual question answering: rewards and metrics by hand, what may not pay, and what users are told."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tasks._vqa import QuestionAnswering, Reference
from tasks.clevr_count import only_number
from vlm_grpo.common.errors import UserError
from vlm_grpo.task import Reward, Sample, check_task, find_task, score

TASKS = ("vqav2", "textvqa", "okvqa", "gqa", "ocrvqa", "docvqa", "chartqa", "clevr_count")
SOFT = ("vqav2", "textvqa", "okvqa")
WORDS = [
    "yes",
    "no",
    "Yes.",
    "2",
    "two",
    "none",
    "a",
    "the",
    "an dog",
    "red/blue",
    "1,000",
    "1.5",
    "",
    " ",
    "?",
    "dont",
]


# ---- the tasks ----

ANSWERS = {
    "vqav2": ["net"] * 7 + ["Netting", "a net", "mesh"],
    "textvqa": ["nokia"] * 10,
    "okvqa": ["race"] * 4 + ["motocross"] * 2 + ["ride"] * 4,
    "gqa": ["yes"],
    "ocrvqa": ["W. Dean Vogt"],
    "docvqa": ["ITC Limited", "itc limited"],
    "chartqa": ["14.5%"],
    "clevr_count": ["7"],
}
GROUPS = {
    "vqav2": ["answer_type/other", "question_type/what is"],
    "okvqa": ["question_type/four"],
    "gqa": ["structural/verify", "semantic/attr"],
    "ocrvqa": ["genre/Calendars"],
    "docvqa": ["question_type/form", "question_type/layout"],
    "chartqa": ["human"],
}


@pytest.fixture
def folder(tmp_path):
    """data/NAME/val.jsonl of two questions for every task."""
    for name in TASKS:
        (tmp_path / name).mkdir()
        Image.new("RGB", (30, 20), (200, 10, 10)).save(tmp_path / name / "a.png")
        rows = [
            {"id": f"{index}", "image": "a.png", "question": f"What {index} {{odd}}?", "answers": ANSWERS[name]}
            | {"question_id": 100 + index, "groups": GROUPS.get(name, [])}
            for index in range(2)
        ]
        (tmp_path / name / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def task(name, folder, **args) -> QuestionAnswering:
    return find_task(name, {"data": str(folder / name), **args})


def sample(answers, groups=(), question_id=1):
    return Sample("a", [], "?", Reference(tuple(answers), question_id, tuple(groups)))


def bare(name) -> QuestionAnswering:
    return find_task(name, {"data": "nowhere"})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_valid(name, folder):
    adapter = task(name, folder)
    check_task(adapter, "val")
    samples = adapter.samples("val")
    assert len(samples) == 2 and samples[1].images == [folder / name / "a.png"]
    assert samples[1].question.startswith("What 1 {odd}?\nAnswer ")
    assert samples[0].target.question_id == 100
    assert len(task(name, folder, limit=1).samples("val")) == 1
    assert adapter.headline in adapter.metric_note


@pytest.mark.parametrize("name", TASKS)
def test_without_data_the_user_is_told_how_to_get_it(name, folder):
    with pytest.raises(UserError, match=rf"task {name} has no data.*python -m data_scripts\.{name}`"):
        find_task(name, {})
    with pytest.raises(UserError, match=rf"splits in .*: val\. Make it with `python -m data_scripts\.{name}`"):
        task(name, folder).samples("train")
    with pytest.raises(UserError, match=r"must hold \{question\}"):
        task(name, folder, question="Well?")
    with pytest.raises(UserError, match=r"task_args\.limit is 0"):
        task(name, folder, limit=0)


@pytest.mark.parametrize("name", ["gqa", "ocrvqa", "clevr_count"])
def test_tasks_without_rows_on_the_hub_say_so(name):
    with pytest.raises(UserError, match=f"task {name} has no data on the hub"):
        find_task(name, {"data": "hub"})


def test_questions_can_be_put_otherwise(folder):
    adapter = task("gqa", folder, question="<{question}>")
    assert adapter.samples("val")[0].question == "<What 0 {odd}?>"


ANY_TEXT = st.one_of(
    st.text(max_size=60),
    st.text(st.characters(), max_size=60),
    st.lists(st.sampled_from([*WORDS, "14.5%", "7", "net", "<answer>", "</answer>", "%", "e9", "nan"]), max_size=9).map(
        " ".join
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=40, deadline=None)
@given(answer=ANY_TEXT, answers=st.lists(st.sampled_from([*WORDS, "14.5%", "7", "net", "0"]), min_size=1, max_size=10))
@example(answer="9" * 6000, answers=["7"])
@example(answer="[" * 3000, answers=["7"])
def test_any_text_has_a_reward_that_is_not_above_full_marks(name, answer, answers):
    if name == "clevr_count":
        answers = ["7"]
    if name == "chartqa" and "nan" in answers:
        return
    adapter = bare(name)
    one = sample(answers)
    reward = score(adapter, one, answer)
    assert reward is not None and 0 <= reward.value <= 1
    assert all(0 <= part <= 1 for part in reward.parts.values())
    assert adapter.headline in reward.parts
    gold = score(adapter, one, adapter.reference_answer(one))
    assert gold is not None and gold.value == pytest.approx(1)


@pytest.mark.parametrize("name", TASKS)
def test_saying_more_than_one_thing_does_not_pay(name):
    adapter, one = bare(name), sample(ANSWERS[name])
    gold = adapter.reference_answer(one)
    others = ["yes", "no", "red", "12", "0.145", "left", "7.5"]
    for many in (
        ", ".join([gold, *others]),
        " or ".join([*others, gold]),
        "\n".join([gold, *others]),
        f"{gold}</answer><answer>no</answer><answer>12",
        " ".join(map(str, range(200))),
        f"{gold} / 3 / 5 / red / left",
    ):
        assert adapter.reward(one, many).value < 0.5, many
    assert adapter.reward(one, gold).value == 1.0


@pytest.mark.parametrize("name", SOFT)
def test_the_reward_is_the_soft_accuracy_over_what_can_be_earned(name):
    adapter = bare(name)
    one = sample(["a"] * 0 + ["red"] * 2 + ["blue"] * 1 + ["green", "pink", "teal", "grey", "black", "white", "lime"])
    assert adapter.reward(one, "Red.").value == 1.0
    assert adapter.reward(one, "blue").value == pytest.approx(0.3 / 0.6)
    assert adapter.reward(one, "violet").value == 0.0
    assert adapter.reward(one, "Red.").parts == pytest.approx({"accuracy": 0.6, "normalised_accuracy": 0.6})
    assert adapter.reference_answer(one) == "red"


def test_reward_normalises_where_the_official_metric_does_not():
    reward = bare("vqav2").reward(sample(["yes"] * 10), "Yes!")
    assert reward == Reward(1.0, {"accuracy": 0.0, "normalised_accuracy": 1.0})


def test_an_answer_that_normalises_to_nothing_earns_nothing_unless_people_gave_it():
    adapter, one = bare("vqav2"), sample(["a"] * 6 + ["b"] * 4)  # the letter, which is dropped as an article
    assert [adapter.reward(one, answer).value for answer in ("", "the", "?", "A", "b")] == [0, 0, 0, 1, 1]
    check = adapter.reference_answer(sample(["?"] * 10))
    assert check == "?" and adapter.reward(sample(["?"] * 10), "?").value == 1.0


def test_padding_does_not_raise_the_reward_of_docvqa():
    adapter, one = bare("docvqa"), sample(["ITC Limited"])
    for wrong in ("xyz" + " " * 400 + "q", "\N{GREEK SMALL LETTER IOTA WITH DIALYTIKA AND TONOS}" * 11):
        reward = adapter.reward(one, wrong)
        assert reward.value == 0.0 and reward.parts["anls"] > 0.5  # what the official script can be led to give
    assert adapter.reward(one, "ITC  limite").value == pytest.approx(10 / 11)


def test_answers_that_are_not_public_have_no_reward_and_are_written_all_the_same():
    adapter = bare("vqav2")
    hidden = sample([], question_id=42)
    assert score(adapter, hidden, "yes") is adapter.reward(hidden, "yes") is None
    assert json.loads(adapter.official_files([hidden], ["yes "])["vqa_results.json"]) == [
        {"question_id": 42, "answer": "yes"}
    ]
    with pytest.raises(UserError, match="no reference answer"):
        adapter.reference_answer(hidden)


def test_metrics_per_group_by_hand():
    adapter = bare("vqav2")
    samples = [
        sample(["2"] * 10, ["answer_type/number", "question_type/how many"]),
        sample(["3"] * 2 + ["4"] * 8, ["answer_type/number", "question_type/how many"]),
        sample(["yes"] * 10, ["answer_type/yes/no", "question_type/is the"]),
    ]
    answers = ["2", "three", "no"]
    rewards = [adapter.reward(one, answer) for one, answer in zip(samples, answers, strict=True)]
    assert adapter.metrics(samples, answers, rewards) == pytest.approx(
        {
            "reward": (1 + 0.6 + 0) / 3,
            "accuracy": (1 + 0.6 + 0) / 3,
            "normalised_accuracy": (1 + 0.6 + 0) / 3,
            "accuracy/answer_type/number": 0.8,
            "accuracy/answer_type/yes/no": 0.0,
            "accuracy/question_type/how many": 0.8,
            "accuracy/question_type/is the": 0.0,
        }
    )


def test_chartqa_averages_its_two_halves():
    adapter = bare("chartqa")
    samples = [sample(["10"], ["human"]), sample(["x"], ["human"]), sample(["x"], ["augmented"])]
    answers = ["10.4", "y", "X"]
    rewards = [adapter.reward(one, answer) for one, answer in zip(samples, answers, strict=True)]
    metrics = adapter.metrics(samples, answers, rewards)
    assert metrics["relaxed_accuracy"] == pytest.approx(2 / 3)
    assert metrics["relaxed_accuracy/human"] == 0.5 and metrics["relaxed_accuracy/augmented"] == 1.0
    assert metrics["relaxed_accuracy/average"] == 0.75
    assert "relaxed_accuracy/average" not in adapter.metrics(samples[:2], answers[:2], rewards[:2])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("There are seven.", 7),
        ("7 objects", 7),
        ("(7)", 7),
        ("7.0", 7),
        ("seven (7)", 7),
        ("7, 8", None),
        ("7 or 8", None),
        ("1,2,3,4,5,6,7", None),
        ("7/8", None),
        ("none", None),
        ("someone", None),
        ("x7", None),
        ("7th", None),
        ("1e1", None),
        ("", None),
    ],
)
def test_a_count_is_the_only_number_of_the_answer(text, number):
    assert only_number(text) == number
    assert bare("clevr_count").reward(sample(["7"]), text).value == float(number == 7)


def test_official_files_are_what_the_servers_read():
    samples = [sample(["x"], question_id=262148000), sample(["x"], question_id=262148001)]
    answers = [" Down\n", "\N{PILE OF POO}"]
    files = {name: bare(name).official_files(samples, answers) for name in TASKS}
    vqa = [{"question_id": 262148000, "answer": "Down"}, {"question_id": 262148001, "answer": "\N{PILE OF POO}"}]
    for name in SOFT:
        assert json.loads(files[name]["vqa_results.json"]) == vqa
    assert json.loads(files["docvqa"]["docvqa_results.json"])[0] == {"questionId": 262148000, "answer": "Down"}
    assert json.loads(files["gqa"]["gqa_predictions.json"])[0] == {"questionId": 262148000, "prediction": "down"}
    assert files["ocrvqa"] == files["chartqa"] == files["clevr_count"] == {}


# ---- generated scenes ----


@pytest.mark.slow
def test_scenes_ask_for_colours_that_the_picture_shows():
    from tasks._generated.scenes import COLOURS

    adapter = find_task("vqav2", {"data": "scenes", "limit": 16})
    for split in ("train", "sft", "val", "test"):
        check_task(adapter, split)
    samples = adapter.samples("val")
    assert samples.ids == [one.id for one in samples]
    words = {one.question for one in samples}
    assert words <= {"left?", "right?", "top?", "bottom?", "small?", "large?"} and len(words) >= 3
    for one in samples:
        answer = adapter.reference_answer(one)
        assert adapter.reference_thought(one).startswith(f"{answer}, ")
        assert _has_colour(one.images[0], COLOURS[answer])
        for other in set(COLOURS) - {answer}:
            assert adapter.reward(one, other).value == 0.0
    assert find_task("vqav2", {}, demo=True).data == "scenes"


def _has_colour(image, colour):
    return sum(math.dist(pixel, colour) < 40 for _, pixel in image.getcolors(1 << 20)) > 0


def test_the_shape_that_is_meant_is_the_furthest_or_largest():
    from tasks._generated.questions import make_question_scene

    keys = {
        "left?": lambda shape: shape.box_xyxy[0] + shape.box_xyxy[2],
        "right?": lambda shape: -shape.box_xyxy[0] - shape.box_xyxy[2],
        "top?": lambda shape: shape.box_xyxy[1] + shape.box_xyxy[3],
        "bottom?": lambda shape: -shape.box_xyxy[1] - shape.box_xyxy[3],
        "small?": lambda shape: shape.side,
        "large?": lambda shape: -shape.side,
    }
    for index in range(40):
        scene, question, answer, _ = make_question_scene("val", index)
        first, second, *_ = sorted(map(keys[question], scene.shapes))
        assert min(scene.shapes, key=keys[question]).colour == answer
        assert first < second, "one shape alone"


@pytest.mark.slow
def test_the_most_frequent_colour_of_a_scene_answers_half_of_its_questions():
    from tasks._generated.questions import make_question_scene

    hits = []
    for index in range(400):
        scene, _, answer, _ = make_question_scene("val", index)
        colours = [shape.colour for shape in scene.shapes]
        assert len(set(colours)) == 2
        hits.append(max(sorted(set(colours)), key=colours.count) == answer)
    # four standard errors
    assert abs(sum(hits) / len(hits) - 0.5) < 0.1


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0"])
def test_a_wrong_seed_is_named(seed):
    with pytest.raises(UserError, match=r"task_args\.seed is"):
        find_task("vqav2", {"data": "scenes", "seed": seed})


def test_scenes_have_the_splits_they_have():
    with pytest.raises(UserError, match="they have: train, sft, val, test"):
        find_task("vqav2", {"data": "scenes"}).samples("testA")
