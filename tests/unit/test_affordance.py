"""ShareRobot affordance, points in masks and AGD20K: rewards by hand, validity, and what cannot be gained."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tasks._generated.scenes import make_scene, middle_of
from tasks.agd20k import AGD20K, GRID, MOST_POINTS, HeatMap
from tasks.lisa_grounding import LisaGrounding
from tasks.point_affordance import PointAffordance, Region
from tasks.sharerobot_affordance import THRESHOLDS, Referent, ShareRobotAffordance
from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring.shapes import similarity
from vlm_grpo.task import Sample, check_task, find_task, score

# ---- ShareRobot ----


def box_sample(box=(0.0, 0.0, 100.0, 100.0)):
    return Sample("a", [Image.new("RGB", (200, 150))], "Where?", Referent(box))


def test_the_affordance_reward_is_the_iou():
    task = ShareRobotAffordance(data="scenes")
    reward = task.reward(box_sample(), "[0, 0, 100, 72]")
    assert reward.value == pytest.approx(0.72)
    # Thresholds .50 .55 .60 .65 .70 of ten are reached
    assert reward.parts == pytest.approx({"iou": 0.72, "ap": 0.5, "ap50": 1.0, "parsed": 1.0})
    assert task.reward(box_sample(), "[0, 0, 200, 150]").value == pytest.approx(1 / 3)  # the whole image
    assert task.reward(box_sample(), "[100, 100, 150, 150], [0, 0, 100, 100]").value == 0.0
    assert task.reward(box_sample(), "there").parts["parsed"] == 0.0


def test_average_precision_is_the_mean_over_thresholds_of_the_share_of_hits():
    task, rng = ShareRobotAffordance(data="scenes"), np.random.default_rng(0)
    samples, answers, ious = [], [], []
    for _ in range(200):
        width = rng.uniform(0, 100)
        samples.append(box_sample())
        answers.append(f"[0, 0, 100, {width:.3f}]")
        ious.append(round(width, 3) / 100)
    rewards = [task.reward(one, text) for one, text in zip(samples, answers, strict=True)]
    metrics = task.metrics(samples, answers, rewards)
    expected = np.mean([[iou >= t for iou in ious] for t in np.arange(0.5, 0.96, 0.05).round(2)])
    assert metrics["ap"] == pytest.approx(expected)
    assert metrics["iou"] == pytest.approx(np.mean(ious))
    assert THRESHOLDS == (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def test_scenes_ask_for_the_middle_of_a_shape():
    task = find_task("sharerobot_affordance", {"data": "scenes", "limit": 8})
    for split in ("train", "sft", "val", "test"):
        check_task(task, split)
    for index, sample in enumerate(task.samples("train")):
        scene = make_scene("train", index)
        assert sample.question == f"Locate: the middle of {scene.expression}"
        assert sample.target.box_xyxy == middle_of(scene.box_xyxy)


def test_a_folder_of_affordances_is_a_valid_task(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    row = {"id": "train-0", "image": "a.png", "instruction": "open the drawer", "bbox_xyxy": [3.5, 4, 20, 30.25]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    task = find_task("sharerobot_affordance", {"data": str(tmp_path)})
    check_task(task)
    assert "The task is: open the drawer." in task.samples("train")[0].question


# ---- points ----


def point_sample(mask):
    height, width = mask.shape
    return Sample("a", [Image.new("RGB", (width, height))], "Point", Region(mask))


def square():
    mask = np.zeros((80, 100), dtype=bool)
    mask[20:40, 10:50] = True
    return point_sample(mask)


def test_the_point_reward_is_the_share_of_points_in_the_mask():
    task = PointAffordance(data="scenes")
    assert task.reward(square(), "[[10, 20]]").value == 1.0
    assert task.reward(square(), "[(49.9, 39.9), (50, 39), (30, 40), (30, 30)]").value == 0.5
    assert task.reward(square(), "[[30, 30], [-5, 30], [30, 500]]").parts == {
        "in_mask": pytest.approx(1 / 3),
        "points": 3.0,
        "parsed": 1.0,
    }
    assert task.reward(square(), "nowhere").parts == {"in_mask": 0.0, "points": 0.0, "parsed": 0.0}
    assert task.reward(square(), "[0.3, 0.3]").value == 0.0  # pixels are meant, whatever the size of the numbers


@pytest.mark.slow
def test_many_points_earn_no_more_than_their_share():
    task, rng = PointAffordance(data="scenes"), np.random.default_rng(1)
    area = 20 * 40 / (80 * 100)
    grid = [(x, y) for x in range(0, 100, 3) for y in range(0, 80, 3)]
    assert task.reward(square(), str(grid)).value == pytest.approx(area, abs=0.03)
    assert task.reward(square(), "[[30, 30], [90, 70]]" * 10).value == 0.5
    for _ in range(10):
        points = rng.uniform(0, 100, (20, 2)).round(1).tolist()
        assert task.reward(square(), str(points)).value <= 1


def test_the_reference_point_lies_in_odd_masks():
    task = PointAffordance(data="scenes")
    ring = np.zeros((60, 60), dtype=bool)
    ring[10:50, 10:50] = True
    ring[15:45, 15:45] = False
    line = np.zeros((5, 400), dtype=bool)
    line[4, 399] = True
    for mask in (ring, line, np.ones((1, 1), dtype=bool)):
        one = point_sample(mask)
        assert task.reward(one, task.reference_answer(one)).value == 1.0


@pytest.mark.slow
def test_scenes_ask_for_a_point_on_a_shape():
    task = find_task("point_affordance", {"data": "scenes", "limit": 12})
    for split in ("train", "sft", "val", "test"):
        check_task(task, split)
    for one in task.samples("train"):
        colour = np.asarray(one.images[0].convert("RGB"), dtype=int)[one.target.mask]
        assert one.target.mask.shape == one.images[0].size[::-1]
        assert colour.std(axis=0).max() == 0  # exactly the pixels of one painted shape
        x, y = json.loads(task.reference_answer(one))[0]
        named = task.question.replace("{question}", "")
        assert one.question.startswith(named) and (np.asarray(one.images[0])[int(y), int(x)] == colour[0]).all()


def test_a_ring_has_a_hole():
    from tasks._generated.scenes import Shape, mask_of

    mask = mask_of(Shape("red", "ring", (10, 10, 50, 50)), (64, 60))
    assert mask.shape == (60, 64) and not mask[30, 30] and mask[30, 12] and not mask[11, 11]


def write_points(folder):
    Image.new("RGB", (40, 30)).save(folder / "a.png")
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:10, 6:20] = 255
    Image.fromarray(mask).save(folder / "m.png")
    rows = [
        {"id": f"location-{n}", "image": "a.png", "mask": "m.png", "question": f"Point out cup {n}."}
        | {"group": f"step {1 + n % 2}"}
        for n in range(3)
    ]
    (folder / "location.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_of_points_is_a_valid_task_and_reports_groups(tmp_path):
    write_points(tmp_path)
    task = find_task("point_affordance", {"data": str(tmp_path)})
    check_task(task, "location")
    samples = list(task.samples("location"))
    assert samples[1].question.startswith("Point out cup 1. Answer with a list of points")
    answers = ["[[7, 6]]", "[[0, 0]]", "[[7, 6], [0, 0]]"]
    rewards = [task.reward(one, text) for one, text in zip(samples, answers, strict=True)]
    metrics = task.metrics(samples, answers, rewards)
    assert metrics["in_mask"] == pytest.approx(0.5)
    assert metrics["in_mask/step 1"] == pytest.approx(0.75) and metrics["in_mask/step 2"] == 0.0


@pytest.mark.parametrize(
    "box", [[20, 4, 3, 30], [1, 2, 1, 9], [1, 2, 3], [float("nan"), 0, 5, 5], [0, 0, float("inf"), 5]]
)
@pytest.mark.parametrize(("task", "words"), [(ShareRobotAffordance, "instruction"), (LisaGrounding, "expression")])
def test_a_row_whose_box_is_none_is_named(tmp_path, task, words, box):
    (tmp_path / "val.jsonl").write_text(json.dumps({"id": "a", "image": "a.png", words: "open it", "bbox_xyxy": box}))
    with pytest.raises(UserError, match=r"val\.jsonl:1: the row cannot be read"):
        task(data=str(tmp_path)).samples("val")[0]


def test_a_mask_that_is_empty_or_missing_is_named(tmp_path):
    write_points(tmp_path)
    Image.new("L", (40, 30)).save(tmp_path / "m.png")
    task = PointAffordance(data=str(tmp_path))
    with pytest.raises(UserError, match=r"'location-0'.*m\.png is empty"):
        score(task, task.samples("location")[0], "[[1, 1]]")
    (tmp_path / "m.png").unlink()
    with pytest.raises(UserError, match=r"m\.png cannot be read"):
        check_task(task, "location")


def test_a_mask_of_another_size_than_its_image_is_named(tmp_path):
    write_points(tmp_path)
    row = json.loads((tmp_path / "location.jsonl").read_text().splitlines()[0])
    (tmp_path / "location.jsonl").write_text(json.dumps(row | {"width": 80, "height": 60}))
    task = PointAffordance(data=str(tmp_path))
    with pytest.raises(UserError, match=r"m\.png is of \(40, 30\) pixels, its image of \(80, 60\)"):
        score(task, task.samples("location")[0], "[[1, 1]]")


# ---- AGD20K ----


def write_agd(folder, size=(300, 200)):
    Image.new("RGB", size).save(folder / "a.jpg")
    y, x = np.mgrid[: size[1], : size[0]]
    blobs = np.exp(-((x - 90) ** 2 + (y - 60) ** 2) / 900) + 0.8 * np.exp(-((x - 200) ** 2 + (y - 150) ** 2) / 1600)
    Image.fromarray((255 * blobs / blobs.max()).astype(np.uint8)).save(folder / "g.png")
    row = {"id": "cut/axe/1", "image": "a.jpg", "heat_map": "g.png", "action": "cut with", "object": "axe"}
    (folder / "seen.jsonl").write_text(json.dumps(row | {"width": size[0], "height": size[1]}))


@pytest.fixture
def agd(tmp_path):
    write_agd(tmp_path)
    task = find_task("agd20k", {"data": str(tmp_path)})
    return task, task.samples("seen")[0]


def test_agd20k_is_a_valid_task(agd):
    task, one = agd
    check_task(task, "seen")
    assert "wants to cut with the axe" in one.question


def test_the_agd_reward_is_sim_relative_to_the_reference_answer(agd):
    task, one = agd
    best = task.reward(one, task.reference_answer(one))
    assert best.value == 1.0 and 0.6 < best.parts["sim"] <= 1 and best.parts["nss"] > 1
    near, far = task.reward(one, "[[90, 60]]"), task.reward(one, "[[280, 20]]")
    assert near.value == pytest.approx(near.parts["sim"] / best.parts["sim"])
    assert 0 <= far.value < 0.2 < near.value < 1
    assert near.parts["kld"] < far.parts["kld"] and near.parts["nss"] > far.parts["nss"]
    nothing = task.reward(one, "no idea")
    assert nothing.value == 0.0 and nothing.parts["nss"] == 0.0 and np.isfinite(nothing.parts["kld"])


def test_points_are_scaled_to_the_grid_by_each_axis(agd):
    _, one = agd
    drawn = one.target.draw([(150.0, 50.0)])  # half of the width, a quarter of the height
    y, x = np.unravel_index(int(np.argmax(drawn)), GRID)
    assert abs(x + 0.5 - 112) <= 0.5 and abs(y + 0.5 - 56) <= 0.5
    assert drawn.max() == 1 and drawn.min() == 0


def test_listing_points_everywhere_does_not_pay(agd):
    task, one = agd
    grid = [(x, y) for x in range(5, 300, 20) for y in range(5, 200, 20)]
    np.random.default_rng(0).shuffle(grid)
    assert len(grid) > 100 and task.reward(one, str([tuple(map(int, p)) for p in grid])).value < 0.75
    honest = task.reference_answer(one)
    padded = json.dumps([*json.loads(honest), *([[280, 20]] * 5)])
    assert task.reward(one, padded).value <= 1.0
    first = [[90, 60]] * MOST_POINTS
    assert task.reward(one, str([*first, [200, 150]])).value == task.reward(one, "[[90, 60]]").value


def test_the_map_is_resized_as_opencv_does(tmp_path):
    # Bilinear between pixel centres: the 2 columns 0, 1 on 4 columns are 0, .25, .75, 1.
    from vlm_grpo.scoring.shapes import resized_map

    assert resized_map(np.array([[0.0, 1.0]]), (1, 4)).tolist() == [[0.0, 0.25, 0.75, 1.0]]
    values = np.random.default_rng(0).random((7, 5))
    assert resized_map(values, (7, 5)) == pytest.approx(values)
    half = resized_map(np.random.default_rng(1).random((6, 8)), (3, 4))
    corners = np.random.default_rng(1).random((6, 8)).reshape(3, 2, 4, 2).mean(axis=(1, 3))
    assert half == pytest.approx(corners)  # by just two, each centre lies between four


def test_wrong_sigma_and_unreadable_maps_are_named(tmp_path):
    with pytest.raises(UserError, match=r"sigma is 0"):
        AGD20K(data="x", sigma=0)
    with pytest.raises(UserError, match=r"data_scripts\.agd20k"):
        AGD20K()
    write_agd(tmp_path)
    Image.new("L", (300, 200)).save(tmp_path / "g.png")
    task = AGD20K(data=str(tmp_path))
    with pytest.raises(UserError, match=r"g\.png is 0 everywhere"):
        check_task(task, "seen")


def test_reference_points_are_close_to_any_smooth_map(tmp_path):
    rng = np.random.default_rng(5)
    for number in range(6):
        y, x = np.mgrid[:120, :160]
        values = np.zeros((120, 160))
        for cx, cy, s in rng.uniform((0, 0, 8), (160, 120, 25), (int(rng.integers(1, 5)), 3)):
            values = np.maximum(values, np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * s * s)))
        Image.fromarray((255 * values).astype(np.uint8)).save(tmp_path / f"{number}.png")
        target = HeatMap(tmp_path / f"{number}.png", (160, 120), 0.06)
        points, like = target.reference
        assert 1 <= len(points) <= MOST_POINTS and like > 0.5
        assert like == similarity(target.draw(points), target.values)


# ---- any text ----

numbers = st.one_of(
    st.integers(-20, 320).map(str), st.floats(-1e6, 1e6).map(str), st.sampled_from(["nan", "1e15", "-0"])
)
pieces = st.one_of(
    numbers, st.sampled_from(["[", "]", "(", ")", ", ", " ", "{", "}", '"point_2d": ', "x=", "<answer>"])
)
texts = st.one_of(st.text(max_size=60), st.lists(pieces, max_size=30).map("".join))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(texts)
def test_no_answer_raises_or_earns_more_than_the_reference(text):
    for task, one in ((ShareRobotAffordance(data="scenes"), box_sample()), (PointAffordance(data="scenes"), square())):
        assert 0 <= score(task, one, text).value <= 1


@settings(max_examples=60, deadline=None)
@given(texts)
def test_no_answer_of_agd20k_raises_or_earns_more_than_the_reference(text):
    target = HeatMap.__new__(HeatMap)
    target.__dict__.update(size=(60, 40), sigma=0.06, path=None)
    target.__dict__["values"] = np.random.default_rng(0).random(GRID)
    target.__dict__["reference"] = ([(10.0, 10.0)], 0.3)
    reward = score(AGD20K(data="x"), Sample("a", [], "", target), text)
    assert 0 <= reward.value <= 1 and all(np.isfinite(value) for value in reward.parts.values())
