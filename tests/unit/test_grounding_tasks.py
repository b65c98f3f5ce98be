"""LISA-Grounding and COCO detection: rewards and AP by hand, mAP against pycocotools, and what cannot be gained."""

import contextlib
import io
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tasks.coco_detection import CocoDetection, Thing, Things, average_precision
from tasks.lisa_grounding import LisaGrounding
from vlm_grpo.common.errors import UserError
from vlm_grpo.scoring.parsing import Detection, parse_detections
from vlm_grpo.task import Sample, check_task, find_task, score

CAT, DOG = ("cat", 17), ("dog", 18)


def thing(box, kind=CAT, crowd=False):
    return Thing(tuple(map(float, box)), *kind, (box[2] - box[0]) * (box[3] - box[1]), crowd)


def sample(*things, image_id=7):
    return Sample("a", [Image.new("RGB", (100, 80))], "Detect", Things(image_id, things))


def answer(*entries):
    return json.dumps([{"bbox_2d": list(box), "label": label} for box, label in entries])


def write_lisa(folder, count=3):
    Image.new("RGB", (100, 80)).save(folder / "a.png")
    rows = [
        {"id": f"test-{i}", "image": "a.png", "expression": f"what keeps off rain {i}", "bbox_xyxy": [10, 20, 60, 70]}
        for i in range(count)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_coco(folder, count=4):
    Image.new("RGB", (100, 80)).save(folder / "a.png")
    with (folder / "val.jsonl").open("w") as lines:
        for number in range(count):
            objects = [
                {"id": 1, "category_id": 17, "label": "cat", "bbox_xyxy": [1, 2, 30, 40], "area": 900, "iscrowd": 0},
                {"id": 2, "category_id": 18, "label": "dog", "bbox_xyxy": [40, 2, 80, 70], "area": 2000, "iscrowd": 0},
                {"id": 3, "category_id": 18, "label": "dog", "bbox_xyxy": [0, 0, 99, 79], "area": 7000, "iscrowd": 1},
            ]
            row = {"id": f"val-{number}", "image": "a.png", "image_id": 100 + number, "width": 100, "height": 80}
            lines.write(json.dumps(row | {"objects": objects}) + "\n")


# ---- LISA ----


def test_lisa_is_a_valid_task(tmp_path):
    write_lisa(tmp_path)
    for protocol in ("standard", "vlm-r1", "lmms-eval"):
        task = find_task("lisa_grounding", {"data": str(tmp_path), "protocol": protocol, "limit": 2})
        check_task(task, "test")
        assert len(task.samples("test")) == 2
    assert "what keeps off rain 0" in LisaGrounding(str(tmp_path)).samples("test")[0].question


def test_lisa_boxes_stay_as_vlm_r1_has_them(tmp_path):
    write_lisa(tmp_path)
    task = LisaGrounding(str(tmp_path), protocol="vlm-r1")
    first = next(one for one in task.samples("test") if one.id == "test-0")
    assert first.target.box_xyxy == (10, 20, 60, 70)  # refcoco's protocol would add a pixel to the right and below
    assert "one pixel wider" not in task.metric_note and "IoU > 0.5" in task.metric_note
    assert task.reward(first, "[10, 20, 60, 45]").parts["acc@0.5"] == 0.0  # an IoU of just 0.5 is no hit
    assert LisaGrounding(str(tmp_path)).reward(first, "[10, 20, 60, 45]").parts["acc@0.5"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"python -m data_scripts\.lisa_grounding"),
        ({"data": "x", "protocol": "mine"}, "accepted: standard, vlm-r1, lmms-eval"),
        ({"data": "x", "limit": 0}, "limit is 0"),
        ({"data": "x", "question": "Where?"}, "must hold {expression}"),
        ({"data": "/nowhere"}, "no folder"),
    ],
)
def test_wrong_arguments_of_lisa_are_named(args, message):
    with pytest.raises(UserError, match=message):
        find_task("lisa_grounding", args).samples("test")


# ---- COCO: the reward ----


def test_the_reward_is_f1_times_mean_iou_by_hand():
    task, two = CocoDetection(data="x"), sample(thing((0, 0, 10, 10)), thing((20, 20, 40, 40), DOG))
    right = answer(((0, 0, 10, 10), "cat"), ((20, 20, 40, 40), "dog"))
    assert task.reward(two, right).value == 1.0
    half = task.reward(two, answer(((0, 0, 10, 5), "cat")))  # IoU 0.5; precision 1, recall 1/2, F1 2/3
    assert half.value == pytest.approx(2 / 3 * 0.5)
    assert half.parts == pytest.approx(
        {"precision": 1.0, "recall": 0.5, "f1": 2 / 3, "matched_iou": 0.5, "parsed": 1.0}
    )
    assert task.reward(two, answer(((0, 0, 10, 10), "dog"))).value == 0.0
    assert task.reward(two, answer(((0, 0, 10, 10), " CAT "))).value == pytest.approx(2 / 3)
    assert task.reward(two, "nothing").value == 0.0


def test_more_huge_or_repeated_boxes_never_earn_more():
    task, two = CocoDetection(data="x"), sample(thing((0, 0, 10, 10)), thing((20, 20, 40, 40), DOG))
    entries = [((0, 0, 10, 9), "cat"), ((20, 20, 40, 38), "dog")]
    honest = task.reward(two, answer(*entries)).value
    rng = random.Random(0)
    for extra in (
        entries,
        [((0, 0, 100, 80), "cat"), ((0, 0, 100, 80), "dog")],
        [((x, y, x + 10, y + 10), label) for x in range(0, 90, 9) for y in range(0, 70, 9) for label in ("cat", "dog")],
        [((rng.randrange(50), rng.randrange(40), 60, 60), "zebra") for _ in range(20)],
    ):
        assert task.reward(two, answer(*entries, *extra)).value < honest
    repeated = f"<answer>{answer(*entries)}</answer>" * 3
    assert task.reward(two, repeated).value == honest


def test_boxes_in_a_crowd_count_neither_way():
    task = CocoDetection(data="x")
    crowded = sample(thing((0, 0, 10, 10)), thing((50, 0, 90, 40), CAT, crowd=True))
    assert task.reward(crowded, answer(((0, 0, 10, 10), "cat"), ((60, 10, 70, 20), "cat"))).value == 1.0
    assert task.reward(crowded, answer(((60, 10, 70, 20), "cat"))).value == 0.0
    # Half of the box inside is enough, a third is not; another label's crowd is none
    assert task.reward(crowded, answer(((0, 0, 10, 10), "cat"), ((40, 0, 60, 10), "cat"))).value == 1.0
    assert task.reward(crowded, answer(((0, 0, 10, 10), "cat"), ((30, 0, 60, 10), "cat"))).value == pytest.approx(2 / 3)
    assert task.reward(crowded, answer(((0, 0, 10, 10), "cat"), ((60, 10, 70, 20), "dog"))).value == pytest.approx(
        2 / 3
    )


def test_coco_is_a_valid_task(tmp_path):
    write_coco(tmp_path)
    task = find_task("coco_detection", {"data": str(tmp_path), "limit": 3})
    check_task(task, "val")
    samples = task.samples("val")
    assert len(samples) == 3 and "categories: cat, dog. Answer" in samples[0].question
    with pytest.raises(UserError, match=r"data_scripts\.coco_detection"):
        find_task("coco_detection", {})
    with pytest.raises(UserError, match=r"must hold \{categories\}"):
        CocoDetection(data="x", question="Detect")


def test_an_image_with_only_crowds_is_named(tmp_path):
    row = {"id": "a", "image": "a.png", "image_id": 1, "objects": []}
    (tmp_path / "val.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"val\.jsonl:1.*no object"):
        CocoDetection(data=str(tmp_path)).samples("val")[0]


# ---- COCO: the metric ----


def test_average_precision_by_hand():
    # One class, two images with a box each. The first answer is exact; the second has IoU 0.6: right up to .60.
    truth = [Things(1, (thing((0, 0, 10, 10)),)), Things(2, (thing((0, 0, 10, 10)),))]
    found = [[Detection((0, 0, 10, 10), "cat")], [Detection((0, 0, 10, 6), "cat")]]
    result = average_precision(truth, found)
    # At .50 .55 .60 precision is 1 at recalls 0 … 1. Above it is 1 up to recall .5, which are 51 of 101 points.
    assert result["AP50"] == pytest.approx(1)
    assert result["AP75"] == pytest.approx(51 / 101)
    assert result["mAP"] == pytest.approx((3 * 1 + 7 * 51 / 101) / 10)


def test_a_wrong_box_before_the_right_one_halves_the_precision():
    truth = [Things(1, (thing((0, 0, 10, 10)),))]
    right, wrong = Detection((0, 0, 10, 10), "cat"), Detection((50, 50, 60, 60), "cat")
    assert average_precision(truth, [[wrong, right]])["mAP"] == pytest.approx(0.5)
    assert average_precision(truth, [[right, wrong]])["mAP"] == pytest.approx(1)  # scores are equal, so order decides


def test_a_label_of_another_image_counts_as_a_false_alarm():
    truth = [Things(1, (thing((0, 0, 10, 10)),)), Things(2, (thing((0, 0, 10, 10), DOG),))]
    cat, dog = Detection((0, 0, 10, 10), "cat"), Detection((0, 0, 10, 10), "dog")
    assert average_precision(truth, [[cat], [dog]])["mAP"] == pytest.approx(1)
    assert average_precision(truth, [[dog, cat], [dog]])["mAP"] == pytest.approx((1 + 0.5) / 2)
    assert average_precision(truth, [[], []]) == {"mAP": 0.0, "AP50": 0.0, "AP75": 0.0}


def official(truth_file, result_file):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(truth_file))
        evaluation = COCOeval(truth, truth.loadRes(str(result_file)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


@pytest.mark.slow
def test_map_and_result_file_equal_the_official_evaluation(tmp_path):
    rng = np.random.default_rng(3)
    task = CocoDetection(data="x")
    for _ in range(8):
        samples, answers, annotations = [], [], []
        for number in range(8):
            things = []
            for _ in range(int(rng.integers(1, 5))):
                x, y = rng.uniform(0, 200, 2).round(1)
                w, h = rng.uniform(5, 120, 2).round(1)
                kind, crowd = (CAT, DOG)[int(rng.integers(2))], bool(things) and rng.random() < 0.2
                things.append(Thing((x, y, x + w, y + h), *kind, float(w * h), bool(crowd)))
            samples.append(Sample(str(number), [], "", Things(1000 + 3 * number, tuple(things))))
            moved = [np.array(t.box_xyxy) + rng.normal(0, 6, 4) for t in things for _ in range(int(rng.integers(3)))]
            answers.append(answer(*[(box.round(2).tolist(), rng.choice(["cat", "dog"])) for box in moved]))
            annotations += [
                {"id": len(annotations) + at + 1, "image_id": 1000 + 3 * number, "category_id": t.category_id}
                | {"bbox": [t.box_xyxy[0], t.box_xyxy[1], t.box_xyxy[2] - t.box_xyxy[0], t.box_xyxy[3] - t.box_xyxy[1]]}
                | {"area": t.area, "iscrowd": int(t.is_crowd)}
                for at, t in enumerate(things)
            ]
        instances = {
            "images": [{"id": one.target.image_id} for one in samples],
            "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}],
            "annotations": annotations,
        }
        (tmp_path / "instances.json").write_text(json.dumps(instances))
        files = task.official_files(samples, answers)
        (tmp_path / "detections.json").write_bytes(files["detections.json"])
        stats = official(tmp_path / "instances.json", tmp_path / "detections.json")
        rewards = [task.reward(one, text) for one, text in zip(samples, answers, strict=True)]
        metrics = task.metrics(samples, answers, rewards)
        names = ("mAP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
        assert [metrics.get(name, -1) for name in names] == pytest.approx(stats[:6].tolist())
        assert metrics["reward"] == pytest.approx(np.mean([reward.value for reward in rewards]))


def test_resampled_images_may_stand_twice():
    truth = [Things(1, (thing((0, 0, 10, 10)),))] * 2
    found = [[Detection((0, 0, 10, 10), "cat")]] * 2
    assert average_precision(truth, found)["mAP"] == pytest.approx(1)


coordinates = st.one_of(st.integers(-50, 150), st.floats(-1e4, 1e4))
entries = st.lists(
    st.tuples(st.tuples(*[coordinates] * 4), st.sampled_from(["cat", "dog", "Cat ", "", "x 3"])), max_size=6
)
pieces = st.sampled_from(
    ['{"bbox_2d": [0, 0, 10, 10], "label": "cat"}', "[1,2,3,4]", '"label": "dog"', "[", "]", "{", "}", ",", "<answer>"]
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.one_of(entries.map(lambda e: answer(*e)), st.lists(pieces, max_size=8).map("".join), st.text(max_size=60)))
def test_no_answer_raises_or_earns_more_than_the_reference(text):
    task = CocoDetection(data="x")
    one = sample(thing((0, 0, 10, 10)), thing((20, 20, 40, 40), DOG), thing((50, 0, 90, 40), CAT, crowd=True))
    reward = score(task, one, text)
    assert 0 <= reward.value <= 1
    found = [parse_detections(text)]
    assert all(0 <= value <= 1 for value in average_precision([one.target], found).values())
    json.loads(task.official_files([one], [text])["detections.json"])
