"""ShareRobot, GRPO-MA's manifests, the three pointing benchmarks and AGD20K, in small files of exactly their shape."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from data_scripts import agd20k, point_affordance, sharerobot_affordance, sharerobot_trajectory
from data_scripts.shapes import box_within, mask_png
from data_scripts.writing import DataError, run_script
from tasks.agd20k import AGD20K
from tasks.point_affordance import PointAffordance
from tasks.sharerobot_affordance import ShareRobotAffordance
from tasks.sharerobot_trajectory import ShareRobotTrajectory
from vlm_grpo.task import check_task


def convert(module, **options):
    arguments = [f"--{key}={value}" for key, value in options.items()]
    return run_script(module.__doc__, module.OPTIONS, module.convert, arguments)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def encoded(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format=form)
    return buffer.getvalue()


def blob(width=64, height=48):
    mask = np.zeros((height, width), dtype=bool)
    mask[10:20, 5:30] = True
    return mask


def save_mask(path, mask):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask.astype(np.uint8) * 255).save(path)


# ---- ShareRobot ----


@pytest.fixture
def sharerobot(tmp_path):
    """affordance/ and trajectory/ as BAAI/ShareRobot has them; the second image is stored at half its size."""
    names = [
        "rtx_frames_success_2/25_bridge#episode_10/frame_0.png",
        "rtx_frames_success_0/62_robo_set#episode_1/frame_0.png",
    ]
    for part in ("affordance", "trajectory"):
        for name, size in zip(names, [(640, 480), (320, 240)], strict=True):
            path = tmp_path / part / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size).save(path)
    meta = {"original_dataset": "bridge", "original_width": 640, "original_height": 480}
    box = {"x": 352.87425387858815, "y": 186.47871614766484, "width": 19.296008229513156, "height": 14.472006172134865}
    points = [[265.45454545454544, 120.0], [275.1515151515152, 162.42424242424244], [280.0, 213.3], [280.0, 259.4]]
    common = [
        {"id": 2486 + at, "image_path": name, "meta_data": meta, "instruction": "place the red fork."}
        for at, name in enumerate(names)
    ]
    affordances = [one | {"affordance": box} for one in common]
    trajectories = [one | {"points": points} for one in common]
    (tmp_path / "affordance/affordance.json").write_text(json.dumps(affordances))
    (tmp_path / "trajectory/trajectory.json").write_text(json.dumps(trajectories))
    return tmp_path


def affordance(folder, **others):
    part = folder / "affordance"
    return convert(
        sharerobot_affordance,
        **{"out": folder / "out", "annotations": part / "affordance.json", "images": part / "images"} | others,
    )


def trajectory(folder, **others):
    part = folder / "trajectory"
    return convert(
        sharerobot_trajectory,
        **{"out": folder / "out", "annotations": part / "trajectory.json", "images": part / "images"} | others,
    )


def test_affordances_become_boxes_of_the_stored_image(sharerobot, capsys):
    assert affordance(sharerobot) == 0
    first, second = lines(sharerobot / "out/train.jsonl")
    assert first == {
        "id": "train-000000",
        "image": "../affordance/images/rtx_frames_success_2/25_bridge#episode_10/frame_0.png",
        "instruction": "place the red fork",
        "bbox_xyxy": [352.874, 186.479, 372.17, 200.951],  # x + width, y + height
        "width": 640,
        "height": 480,
        "source": "bridge",
    }
    assert second["bbox_xyxy"] == pytest.approx([side / 2 for side in first["bbox_xyxy"]], abs=0.001)
    assert "train: 2 boxes (official 6,522, DIFFERS)" in capsys.readouterr().out
    check_task(ShareRobotAffordance(data=str(sharerobot / "out")))


def test_trajectories_become_points_of_the_stored_image(sharerobot, capsys):
    assert trajectory(sharerobot, split="test", limit=2) == 0
    first, second = lines(sharerobot / "out/test.jsonl")
    assert first["points"] == [[265.455, 120.0], [275.152, 162.424], [280.0, 213.3], [280.0, 259.4]]
    assert first["instruction"] == "place the red fork" and (first["width"], first["height"]) == (640, 480)
    assert second["points"][0] == [132.727, 60.0] and second["width"] == 320
    assert "test: 2 paths (no official count known, limit=2)" in capsys.readouterr().out
    check_task(ShareRobotTrajectory(data=str(sharerobot / "out")), "test")


def test_older_files_name_the_image_by_its_id_and_the_points_trajectory(sharerobot):
    path = sharerobot / "trajectory/trajectory.json"
    records = json.loads(path.read_text())
    for record in records:
        record["id"] = record.pop("image_path")
        record["trajectory"] = record.pop("points")
    path.write_text(json.dumps(records))
    assert trajectory(sharerobot) == 0 and len(lines(sharerobot / "out/train.jsonl")) == 2


def test_grpo_ma_manifests_are_read(tmp_path, capsys):
    root = tmp_path / "data_root"
    (root / "ShareRobot/trajectory/images").mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(root / "ShareRobot/trajectory/images/1.png")
    record = {
        "id": 3,
        "image": "ShareRobot/trajectory/images/1.png",
        "question": "<image>You are a robot. Where do you move to pick the carrot?",
        "question_type": "trajectory-sharerobot",
        "answer": [[265, 120], [275, 162], [280, 213]],
    }
    without_id = {key: value for key, value in record.items() if key != "id"}
    other = record | {"question_type": "affordance-sharerobot", "answer": [1, 2, 3, 4]}
    (tmp_path / "train.json").write_text(json.dumps([record, other, without_id]))
    out = tmp_path / "out"
    assert convert(sharerobot_trajectory, out=out, annotations=tmp_path / "train.json", images=root) == 0
    rows = lines(out / "train.jsonl")
    assert rows[0] == {
        "id": "train-000000",
        "image": "../data_root/ShareRobot/trajectory/images/1.png",
        "points": [[265.0, 120.0], [275.0, 162.0], [280.0, 213.0]],
        "question": "You are a robot. Where do you move to pick the carrot?",
        "width": 640,
        "height": 480,
    }
    assert [row["id"] for row in rows] == ["train-000000", "train-000002"]
    printed = capsys.readouterr().out
    assert "train: 2 paths (official 3,435, DIFFERS)" in printed and "1 records of other question types" in printed
    task = ShareRobotTrajectory(data=str(out))
    check_task(task)
    assert task.samples("train")[0].question == "You are a robot. Where do you move to pick the carrot?"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": [[1, 2], [3, 4]]}, "1 paths of under 3 points"),
        ({"points": [[1, 2], [3, 4], [900, 5]]}, "1 paths that leave their image"),
        ({"points": [1, 2, 3]}, "record 1: the points must be"),
        ({"points": None}, "record 1: the points must be"),
        ({"points": [[1, 2], [3, "nan"], [5, 6]]}, "record 1: the points must be"),
        ({"instruction": None}, "record 1 is not in ShareRobot's form"),
        ({"image_path": "none.png"}, "1 images missing"),
    ],
)
def test_a_bad_path_is_named_and_nothing_is_written(sharerobot, change, message, capsys):
    path = sharerobot / "trajectory/trajectory.json"
    records = json.loads(path.read_text())
    records[1] |= change
    path.write_text(json.dumps(records))
    assert trajectory(sharerobot) == 2
    assert message in capsys.readouterr().err
    assert list((sharerobot / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ({"x": 1, "y": 2, "width": 0, "height": 5}, "1 boxes that are empty"),
        ({"x": 630, "y": 2, "width": 100, "height": 5}, "1 boxes that are empty or leave"),
        ({"x": 1, "y": 2}, "the affordance must be"),
    ],
)
def test_a_bad_affordance_is_named(sharerobot, box, message, capsys):
    path = sharerobot / "affordance/affordance.json"
    records = json.loads(path.read_text())
    records[0]["affordance"] = box
    path.write_text(json.dumps(records))
    assert affordance(sharerobot) == 2
    assert message in capsys.readouterr().err


# ---- points ----

SUFFIX = (
    "Your answer should be formatted as a list of tuples, i.e. [(x1, y1)], where each tuple contains the x and y "
    "coordinates of a point satisfying the conditions above. The coordinates should be between 0 and 1, indicating the "
    "normalized pixel locations of the points in the image."
)


def points(folder, source, split, **others):
    return convert(point_affordance, out=folder / "out", source=source, split=split, **others)


def stored_mask(folder, row):
    return np.asarray(Image.open(folder / "out" / row["mask"]))


def test_where2place_with_jpeg_masks_becomes_rows(tmp_path, capsys):
    for number in range(2):
        image = tmp_path / f"images/{number:02d}.jpg"
        image.parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 48)).save(image)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(blob().astype(np.uint8) * 255).save(tmp_path / f"masks/{number:02d}.jpg", quality=80)
    rows = [
        {
            "question_id": n,
            "image": f"{n:02d}.jpg",
            "text": f"In the image, locate space {n}. {SUFFIX}",
            "category": "x",
        }
        for n in range(2)
    ]
    (tmp_path / "point_questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert points(tmp_path, tmp_path / "point_questions.jsonl", "where2place") == 0
    row = lines(tmp_path / "out/where2place.jsonl")[1]
    assert row["question"] == "In the image, locate space 1." and row["image"] == "../images/01.jpg"
    stored = stored_mask(tmp_path, row)
    assert set(np.unique(stored)) == {0, 255} and (stored[11:19, 6:29] == 255).all()  # but for JPEG at the edge
    assert "where2place: 2 questions (official 100, DIFFERS)" in capsys.readouterr().out
    check_task(PointAffordance(data=str(tmp_path / "out")), "where2place")


def test_where2places_masks_are_those_of_the_row_number(tmp_path):
    rows = [{"question_id": n, "image": f"{name}.png", "text": "Where?"} for n, name in enumerate(("01", "shelf"))]
    (tmp_path / "point_questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "images").mkdir()
    for name in ("01", "shelf"):
        Image.new("RGB", (64, 48)).save(tmp_path / f"images/{name}.png")
    save_mask(tmp_path / "masks/00.png", ~blob())
    save_mask(tmp_path / "masks/01.png", blob())  # of the second row, though the first one's image has that name
    assert points(tmp_path, tmp_path / "point_questions.jsonl", "where2place") == 0
    first, second = (stored_mask(tmp_path, row) for row in lines(tmp_path / "out/where2place.jsonl"))
    assert (first == ~blob() * 255).all() and (second == blob() * 255).all()
    (tmp_path / "masks/01.png").rename(tmp_path / "masks/shelf.png")
    assert points(tmp_path, tmp_path / "point_questions.jsonl", "where2place") == 0  # there is none of that number
    assert (stored_mask(tmp_path, lines(tmp_path / "out/where2place.jsonl")[1]) == blob() * 255).all()


def test_refspatials_raw_files_become_rows(tmp_path):
    folder = tmp_path / "Location"
    (folder / "image").mkdir(parents=True)
    Image.new("RGB", (64, 48)).save(folder / "image/0.png")
    save_mask(folder / "mask/0.png", blob())
    question = {"id": 0, "object": "the orange box", "prompt": "Please point out the orange box.", "suffix": SUFFIX}
    question |= {"rgb_path": "image/0.png", "mask_path": "mask/0.png", "category": "location", "step": 1}
    (folder / "question.json").write_text(json.dumps([question]))
    assert points(tmp_path, folder / "question.json", "location") == 0
    row = lines(tmp_path / "out/location.jsonl")[0]
    assert row["question"] == "Please point out the orange box." and row["group"] == "step 1"
    assert (stored_mask(tmp_path, row) == blob() * 255).all()
    check_task(PointAffordance(data=str(tmp_path / "out")), "location")


def test_refspatials_parquet_becomes_rows(tmp_path):
    import datasets

    features = datasets.Features(
        {"id": datasets.Value("int64"), "image": datasets.Image(), "mask": datasets.Image()}
        | {name: datasets.Value("string") for name in ("object", "prompt", "suffix")}
        | {"step": datasets.Value("int64")}
    )
    rows = [
        {
            "id": n,
            "image": Image.new("RGB", (64, 48), (n, 0, 0)),
            "mask": Image.fromarray(blob().astype(np.uint8) * 255),
        }
        | {"object": "cup", "prompt": f"Please point to cup {n}.", "suffix": SUFFIX, "step": 2 + n}
        for n in range(3)
    ]
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/placement-00000-of-00001.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(path))
    for source in (path, tmp_path / "data"):
        assert points(tmp_path, source, "placement", limit=2) == 0
        written = lines(tmp_path / "out/placement.jsonl")
        assert [row["group"] for row in written] == ["step 2", "step 3"]
        assert written[0]["image"] == "images/placement-00000.png"
        check_task(PointAffordance(data=str(tmp_path / "out")), "placement")


def test_roboafford_with_runs_or_files_becomes_rows(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / "images/a.jpg")
    save_mask(tmp_path / "masks/a.png", blob())
    runs = coco_mask.encode(np.asfortranarray(blob().astype(np.uint8)))
    compressed = {"size": runs["size"], "counts": runs["counts"].decode()}
    flat = blob().T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat])))
    plain = {"size": [48, 64], "counts": np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()}
    rows = [
        {"img": img, "mask": mask, "question": f"Which part opens it? {SUFFIX}", "answer": [[6, 11]]}
        | {"category": "object affordance"}
        for img, mask in (
            ("a.jpg", "a.png"),
            ("images/a.jpg", "masks/a.png"),
            ("./images/a.jpg", "./mask/a.png"),
            ("image/a.jpg", "mask/a.png"),
            ("a.jpg", compressed),
            ("a.jpg", plain),
        )
    ]
    (tmp_path / "annotations_absxy.json").write_text(json.dumps(rows))
    assert points(tmp_path, tmp_path / "annotations_absxy.json", "roboafford") == 0
    written = lines(tmp_path / "out/roboafford.jsonl")
    assert len(written) == 6 and {row["group"] for row in written} == {"object affordance"}
    for row in written:
        assert (stored_mask(tmp_path, row) == blob() * 255).all()
    check_task(PointAffordance(data=str(tmp_path / "out")), "roboafford")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "none.png"}, "1 masks missing"),
        ({"mask": "small.png"}, "1 masks of another size than their image"),
        ({"mask": "empty.png"}, "1 masks without any pixel inside"),
        ({"mask": "broken.png"}, "1 masks that cannot be read"),
        ({"mask": {"size": [48, 64], "counts": [1, 2, 3]}}, "1 masks that cannot be read"),
        ({"mask": {"size": [48, 64]}}, "1 masks that cannot be read"),
        ({"img": "none.jpg"}, "1 images missing"),
        ({"question": None}, "none of the three benchmarks"),
        ({"img": ""}, "none of the three benchmarks"),
    ],
)
def test_a_bad_mask_is_named_and_no_split_is_written(tmp_path, change, message, capsys):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / "images/a.jpg")
    save_mask(tmp_path / "masks/a.png", blob())
    save_mask(tmp_path / "masks/small.png", blob(40, 30))
    save_mask(tmp_path / "masks/empty.png", blob() & False)
    (tmp_path / "masks/broken.png").write_bytes(b"no image")
    good = {"img": "a.jpg", "mask": "a.png", "question": "Where?", "category": "c"}
    (tmp_path / "annotations.json").write_text(json.dumps([good, good | change]))
    assert points(tmp_path, tmp_path / "annotations.json", "roboafford") == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.jsonl*"))


def test_masks_of_every_form_are_read():
    mask = blob()
    grey = Image.fromarray(mask.astype(np.uint8) * 255)
    forms = [grey, grey.convert("1"), grey.convert("RGB"), grey.convert("P"), grey.convert("LA"), grey.convert("RGBA")]
    forms.append(Image.fromarray(mask.astype(np.uint16) * 65535))
    for image in forms:
        assert (np.asarray(Image.open(io.BytesIO(mask_png(encoded(image))))) == mask * 255).all(), image.mode
    rng = np.random.default_rng(0)
    for _ in range(50):
        random_mask = rng.random((int(rng.integers(1, 20)), int(rng.integers(1, 20)))) < 0.4
        runs = coco_mask.encode(np.asfortranarray(random_mask.astype(np.uint8)))
        assert (np.asarray(Image.open(io.BytesIO(mask_png(runs)))) == random_mask * 255).all()
    with pytest.raises(DataError, match="run-length"):
        mask_png({"size": [2, 2], "counts": [9]})


def test_boxes_are_cut_by_no_more_than_the_tolerance():
    assert box_within((-0.4, 0, 10.2, 5), (10, 8), 0.5) == [0.0, 0.0, 10.0, 5.0]
    assert box_within((-0.6, 0, 10, 5), (10, 8), 0.5) is None
    assert box_within((3, 3, 3.0001, 5), (10, 8), 0.5) is None  # empty once it is rounded


# ---- AGD20K ----


@pytest.fixture
def agd(tmp_path):
    """Seen/ and Unseen/testset with egocentric images and GT, one image without a heat map."""
    for setting, thing in (("Seen", "golf_clubs"), ("Unseen", "axe")):
        testset = tmp_path / "AGD20K" / setting / "testset"
        for number in range(3):
            path = testset / f"egocentric/cut_with/{thing}/{thing}_{number:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (90, 60)).save(path)
            if number < 2:
                y, x = np.mgrid[:60, :90]
                heat = np.exp(-((x - 30) ** 2 + (y - 20) ** 2) / 200)
                target = testset / f"GT/cut_with/{thing}/{thing}_{number:06d}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((heat * 255).astype(np.uint8)).save(target)
    return tmp_path


def test_agd20ks_folders_become_rows(agd, capsys):
    assert convert(agd20k, out=agd / "out", root=agd / "AGD20K") == 0
    rows = lines(agd / "out/seen.jsonl")
    assert rows[0] == {
        "id": "cut_with/golf_clubs/golf_clubs_000000",
        "image": "../AGD20K/Seen/testset/egocentric/cut_with/golf_clubs/golf_clubs_000000.jpg",
        "heat_map": "../AGD20K/Seen/testset/GT/cut_with/golf_clubs/golf_clubs_000000.png",
        "action": "cut with",
        "object": "golf clubs",
        "width": 90,
        "height": 60,
    }
    printed = capsys.readouterr().out
    assert convert(agd20k, out=agd / "out", root=agd / "AGD20K", split="unseen") == 0
    assert "seen: not in the source" not in capsys.readouterr().out
    assert "seen: 2 images (official 1,675, DIFFERS)" in printed and "unseen: 2 images (official 540" in printed
    assert "seen: 1 egocentric images have no heat map" in printed
    for split in ("seen", "unseen"):
        check_task(AGD20K(data=str(agd / "out")), split)


def test_agd20k_names_what_is_missing(agd, capsys):
    assert convert(agd20k, out=agd / "out", root=agd) == 2
    assert "root must be the folder of AGD20K" in capsys.readouterr().err
    assert convert(agd20k, out=agd / "out", root=agd / "AGD20K", split="both") == 2
    assert "accepted: seen, unseen" in capsys.readouterr().err
    (agd / "AGD20K/Seen/testset/egocentric/cut_with/golf_clubs/golf_clubs_000000.jpg").unlink()
    assert convert(agd20k, out=agd / "out", root=agd / "AGD20K", split="seen") == 2
    assert "1 images missing" in capsys.readouterr().err


def test_a_run_that_was_interrupted_goes_on(sharerobot, monkeypatch, capsys):
    real = sharerobot_affordance.box_within
    calls = []

    def stop(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sharerobot_affordance, "box_within", stop)
    assert affordance(sharerobot) == 130
    assert list((sharerobot / "out").iterdir()) == []
    monkeypatch.setattr(sharerobot_affordance, "box_within", real)
    assert affordance(sharerobot) == 0
    assert len(lines(sharerobot / "out/train.jsonl")) == 2
