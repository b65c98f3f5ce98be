"""ShareRobot trajectories: distances and rewards by hand, validity, and what cannot be gained."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.spatial.distance import directed_hausdorff

from tasks.sharerobot_trajectory import NUMBERS, Path2D, ShareRobotTrajectory
from vlm_grpo.common.errors import UserError
from vlm_grpo.task import Sample, check_task, find_task, score

SIZE = (640, 480)
POINTS = ((64.0, 48.0), (320.0, 240.0), (576.0, 48.0))


def sample(points=POINTS, size=SIZE):
    return Sample("a", [Image.new("RGB", size)], "Move", Path2D(points, size))


def test_the_reward_falls_with_the_distance_by_hand():
    task = ShareRobotTrajectory(data="scenes")
    exact = task.reward(sample(), "[[64, 48], [320, 240], [576, 48]]")
    assert exact.value == 1.0
    assert exact.parts == {"dfd": 0.0, "hd": 0.0, "rmse": 0.0, "rmse_index": 0.0, "parsed": 1.0}
    # All points 64 of 640 pixels to the right: each a tenth of the width away
    moved = task.reward(sample(), "[[128, 48], [384, 240], [640, 48]]")
    assert moved.parts == pytest.approx({"dfd": 0.1, "hd": 0.1, "rmse": 0.1, "rmse_index": 0.1, "parsed": 1.0})
    assert moved.value == pytest.approx(0.8)
    assert ShareRobotTrajectory(data="scenes", zero_at=0.2).reward(
        sample(), "[[128, 48], [384, 240], [640, 48]]"
    ).value == (pytest.approx(0.5))
    # 48 of 480 down is as far as 64 of 640 across
    assert task.reward(sample(), "[[64, 96], [320, 288], [576, 96]]").parts["dfd"] == pytest.approx(0.1)


def test_sharerobots_rmse_takes_the_points_as_they_are_numbered():
    task = ShareRobotTrajectory(data="scenes")
    # Of two points the second lies (.3, 0) from the reference's second, whose third is left out
    parts = task.reward(sample(), "[[64, 48], [512, 240]]").parts
    assert parts["rmse_index"] == pytest.approx(math.sqrt((0 + 0.3**2) / 2))
    # A fourth point is left out; the first three are .1 to the right, (0, .1) further down, and (.3, .4) away
    longer = "[[128, 48], [320, 288], [384, 240], [0, 0]]"
    assert task.reward(sample(), longer).parts["rmse_index"] == pytest.approx(math.sqrt((0.01 + 0.01 + 0.25) / 3))
    assert "rmse_index: ShareRobot's own" in task.metric_note
    assert task.reward(sample(), "none").parts["rmse_index"] == pytest.approx(math.sqrt(2))


def test_the_way_back_is_another_path():
    task = ShareRobotTrajectory(data="scenes")
    back = task.reward(sample(), "[[576, 48], [320, 240], [64, 48]]")
    assert back.parts["hd"] == 0.0 and back.parts["dfd"] == pytest.approx(0.8) and back.value == 0.0


def test_without_a_path_every_distance_is_the_diagonal():
    task = ShareRobotTrajectory(data="scenes")
    for text in ("", "forward", "(64, 48)", "[64, 48]"):
        reward = task.reward(sample(), text)
        assert reward.value == 0.0 and reward.parts["parsed"] == 0.0
        assert reward.parts["dfd"] == reward.parts["hd"] == reward.parts["rmse"] == pytest.approx(math.sqrt(2))


@pytest.mark.slow
def test_distances_equal_formulas_written_anew():
    task, rng = ShareRobotTrajectory(data="scenes"), np.random.default_rng(0)
    for _ in range(100):
        reference = rng.uniform(0, 1, (int(rng.integers(3, 8)), 2)) * SIZE
        found = (rng.uniform(0, 1, (int(rng.integers(2, 8)), 2)) * SIZE).round(2)
        parts = task.reward(sample(tuple(map(tuple, reference))), str(found.tolist())).parts
        p, q = found / SIZE, reference / SIZE
        table = np.full((len(p), len(q)), np.inf)
        for i in range(len(p)):
            for j in range(len(q)):
                before = [table[a, b] for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if a >= 0 and b >= 0]
                table[i, j] = max(min(before, default=0), np.linalg.norm(p[i] - q[j]))
        assert parts["dfd"] == pytest.approx(table[-1, -1])
        assert parts["hd"] == pytest.approx(max(directed_hausdorff(p, q)[0], directed_hausdorff(q, p)[0]))


def test_more_points_never_help():
    task = ShareRobotTrajectory(data="scenes")
    honest = [[70, 48], [320, 230], [570, 60]]
    value = task.reward(sample(), str(honest)).value
    assert task.reward(sample(), str([p for p in honest for _ in range(5)])).value == pytest.approx(value)
    assert task.reward(sample(), str(honest * 2)).value < value
    grid = [[x, y] for x in range(0, 640, 32) for y in range(0, 480, 32)]
    assert task.reward(sample(), str(grid)).value < 0.1
    assert task.reward(sample(), f"<answer>{honest}</answer>" * 4).value == value
    assert task.reward(sample(), f"{honest} {list(map(list, POINTS))}").value < value


def test_scenes_ask_for_a_path_of_so_many_points():
    task = find_task("sharerobot_trajectory", {"data": "scenes", "limit": 24})
    for split in ("train", "sft", "val", "test"):
        check_task(task, split, 6)
    words = {word: count for count, word in NUMBERS.items()}
    for one in task.samples("train"):
        assert words[one.question.split()[1]] == len(one.target.points)
        (x1, y1), (x2, y2) = one.target.points[0], one.target.points[-1]
        assert math.hypot(x2 - x1, y2 - y1) > 20
        assert task.reference_thought(one).count(" to ") == 1
    assert {len(one.target.points) for one in task.samples("train")} == {3, 4, 5}
    assert [one.id for one in task.samples("val")][:2] == ["val-0-000000", "val-0-000001"]


def test_the_tiny_model_knows_every_word_of_the_scenes():
    from tokenizers import Tokenizer

    import vlm_grpo.tiny

    tokenizer = Tokenizer.from_file(str(next(iter(vlm_grpo.tiny.__path__)) + "/tokenizer.json"))
    for name in ("sharerobot_trajectory", "sharerobot_affordance", "point_affordance"):
        task = find_task(name, {"data": "scenes", "limit": 40})
        for one in task.samples("train"):
            text = f"{one.question} {task.reference_thought(one)}"
            assert len(tokenizer.encode(text).tokens) <= 1.7 * len(text.split()), text


def test_a_folder_is_a_valid_task(tmp_path):
    Image.new("RGB", SIZE).save(tmp_path / "a.png")
    common = {"image": "a.png", "points": [list(p) for p in POINTS], "width": SIZE[0], "height": SIZE[1]}
    rows = [common | {"id": "0", "instruction": "reach for the carrot"}, common | {"id": "1", "question": "Go where?"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = find_task("sharerobot_trajectory", {"data": str(tmp_path)})
    check_task(task)
    first, second = task.samples("train")
    assert "The task is: reach for the carrot." in first.question and second.question == "Go where?"
    metrics = task.metrics([first], ["none"], [task.reward(first, "none")])
    assert metrics["dfd"] == pytest.approx(math.sqrt(2)) and metrics["reward"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"data_scripts\.sharerobot_trajectory"),
        ({"data": "scenes", "zero_at": 0}, "zero_at is 0"),
        ({"data": "scenes", "seed": -1}, "seed is -1"),
        ({"data": "scenes", "question": "Go"}, "must hold {instruction}"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(UserError, match=message):
        find_task("sharerobot_trajectory", args)


def test_a_short_reference_is_named(tmp_path):
    row = {"id": "0", "image": "a.png", "instruction": "x", "points": [[1, 2], [3, 4]], "width": 9, "height": 9}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"train\.jsonl:1.*2 points"):
        ShareRobotTrajectory(data=str(tmp_path)).samples("train")[0]


numbers = st.one_of(st.integers(-50, 700).map(str), st.floats(-1e9, 1e9).map(str))
pieces = st.one_of(numbers, st.sampled_from(["[", "]", "(", ")", ", ", " -> ", "{", "}", '"point_2d": ', "<answer>"]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(pieces, max_size=30).map("".join)))
def test_no_answer_raises_or_earns_more_than_the_reference(text):
    reward = score(ShareRobotTrajectory(data="scenes"), sample(), text)
    assert 0 <= reward.value <= 1 and all(0 <= value < 20 for value in reward.parts.values())


def test_the_question_put_around_an_instruction_is_that_of_scenes_too():
    usual, own = (
        find_task("sharerobot_trajectory", {"data": "scenes", **args}).samples("val")[0].question
        for args in ({}, {"question": "Draw {instruction}!"})
    )
    assert usual.startswith("Locate ") and own == usual.replace("Locate ", "Draw ") + "!"
