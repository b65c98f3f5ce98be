"""The shipped tiny model and the generated scenes it was warm-started on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLForConditionalGeneration

from data_scripts import tiny_scenes
from data_scripts.build_tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_model, make_processor, make_tokenizer
from data_scripts.tiny_scenes import write_split
from data_scripts.writing import DataError
from tasks._generated.scenes import SPLITS, Scene, Shape, describe, make_scene
from tasks._generated.warm_start import loosen_box, warm_start_example
from vlm_grpo.tiny import TINY_PATH


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(TINY_PATH)


def painted_box(scene: Scene) -> tuple[int, int, int, int]:
    """The extent of saturated pixels around the target, found from the picture alone."""
    x1, y1, x2, y2 = scene.box_xyxy
    left, top = max(x1 - 2, 0), max(y1 - 2, 0)
    pixels = np.asarray(scene.image).astype(int)[top : y2 + 2, left : x2 + 2]
    rows, columns = np.nonzero(pixels.max(-1) - pixels.min(-1) > 60)  # backgrounds are grey within 20 levels
    return left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1


def shapes_named(scene: Scene) -> list[Shape]:
    """The shapes an expression is true of: a second reading of the words, written apart from the generator."""
    words = scene.expression.split()[1:]
    group = [shape for shape in scene.shapes if shape.colour == words[-2]]
    order = {
        "left": lambda s: s.centre[0],
        "right": lambda s: -s.centre[0],
        "top": lambda s: s.centre[1],
        "bottom": lambda s: -s.centre[1],
        "small": lambda s: s.side,
        "large": lambda s: -s.side,
    }
    if words[0] in order:
        best = min(order[words[0]](shape) for shape in group)
        group = [shape for shape in group if order[words[0]](shape) == best]
    return group


def test_boxes_equal_the_painted_pixels():
    for index in range(150):
        scene = make_scene("val", index)
        assert painted_box(scene) == scene.box_xyxy, (scene.id, scene.expression)


def test_expressions_name_exactly_their_target():
    for index in range(300):
        scene = make_scene("train", index)
        assert [shape.box_xyxy for shape in shapes_named(scene)] == [scene.box_xyxy], (scene.id, scene.expression)


def test_scenes_repeat_and_splits_differ():
    first, again = make_scene("val", 3), make_scene("val", 3)
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.expression, first.box_xyxy, first.thought) == (again.expression, again.box_xyxy, again.thought)
    pictures = {make_scene(split, index).image.tobytes() for split in SPLITS for index in range(20)}
    pictures |= {make_scene("val", index, seed=1).image.tobytes() for index in range(20)}
    assert len(pictures) == 5 * 20
    with pytest.raises(ValueError, match="'testA'"):
        make_scene("testA", 0)


def test_scenes_are_not_square_and_need_comparison():
    scenes = [make_scene("train", index) for index in range(200)]
    assert sum(scene.image.width != scene.image.height for scene in scenes) > 190
    comparisons = ("left", "right", "top", "bottom", "small", "large")
    compared = sum(scene.expression.split()[1] in comparisons for scene in scenes)
    assert 0.5 < compared / len(scenes) < 0.9


def test_loose_boxes_hold_the_exact_one():
    rng = np.random.default_rng(0)
    assert loosen_box(rng, (10, 20, 30, 60), 0.0, (100, 100)) == (10, 20, 30, 60)
    boxes = np.array([loosen_box(rng, (10, 20, 30, 60), 0.35, (100, 100)) for _ in range(500)])
    assert (boxes.min(0) == (3, 6, 30, 60)).all() and (boxes.max(0) == (10, 20, 37, 74)).all()
    assert loosen_box(rng, (0, 0, 4, 4), 0.9, (4, 4)) == (0, 0, 4, 4)


def test_warm_start_answers_are_true():
    kinds = set()
    for index in range(60):
        image, question, thought, answer = warm_start_example("dense", index)
        scene = make_scene("sft", index, fewest=1)
        assert image.tobytes() == scene.image.tobytes()
        kinds.add(question.split()[0])
        if question.startswith("Locate"):
            assert (thought, answer) == (scene.thought, str(list(scene.box_xyxy)))
        elif question.startswith("What"):
            (shape,) = (s for s in scene.shapes if str(list(s.box_xyxy)) in question)
            assert answer == shape.colour
        else:
            ordered = sorted(scene.shapes, key=lambda shape: shape.centre[0] - shape.side / 2)
            listed = [describe(shape, image.size) for shape in ordered]
            if question.startswith("List"):
                listed = [f"{name} {list(s.box_xyxy)}" for name, s in zip(listed, ordered, strict=True)]
            assert answer == "; ".join(listed)
    assert kinds == {"Locate:", "What", "Name", "List"}


def test_the_warm_start_for_demand_names_the_colour_and_draws_loosely():
    exact = 0
    for index in range(20):
        image, question, thought, answer = warm_start_example("demand", index, looseness=0.7)
        scene = make_scene("sft", index)
        x1, y1, x2, y2 = scene.box_xyxy
        said = json.loads(answer)
        a1, b1, a2, b2 = said["bbox_2d"]
        assert image.tobytes() == scene.image.tobytes() and thought == scene.thought
        assert said["label"] in scene.expression and question == f"Locate: a {said['label']} shape"
        assert 0 <= a1 <= x1 and 0 <= b1 <= y1 and x2 <= a2 <= image.width and y2 <= b2 <= image.height
        exact += (a1, b1, a2, b2) == scene.box_xyxy
    assert exact == 0


def test_written_split_holds_the_scenes(tmp_path):
    lines = write_split(tmp_path, "test", 3).read_text().splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test", "test.jsonl"]
    for index, line in enumerate(lines):
        row, scene = json.loads(line), make_scene("test", index)
        with Image.open(tmp_path / row["image"]) as image:
            assert image.tobytes() == scene.image.tobytes()
        assert row["bbox_xyxy"] == list(scene.box_xyxy) and (row["width"], row["height"]) == scene.image.size


def test_the_command_line_writes_a_split_and_names_a_wrong_option(tmp_path):
    [written] = tiny_scenes.convert({"out": str(tmp_path), "split": "test", "count": "2"})
    assert len(Path(written).read_text().splitlines()) == 2
    for options, message in (({"split": "tests"}, "split is 'tests'"), ({"count": "many"}, "count is 'many'")):
        with pytest.raises(DataError, match=message):
            tiny_scenes.convert({"out": str(tmp_path)} | options)


def test_checkpoint_loads_plainly_and_answers(processor):
    model = AutoModelForImageTextToText.from_pretrained(TINY_PATH, dtype=torch.float32)
    assert type(model) is Qwen2_5_VLForConditionalGeneration
    assert model.num_parameters() < 5_000_000
    assert sum(path.stat().st_size for path in TINY_PATH.rglob("*") if path.is_file()) < 12 * 2**20
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Locate: the red ring"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True) + "<think>"
    inputs = processor(images=[make_scene("test", 0).image], text=[text], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=3)
    assert inputs["input_ids"].shape[1] < output.shape[1]


def test_tokenizer_round_trips_and_splits_digits(processor):
    tokenizer = processor.tokenizer
    for text in (
        "Locate: the small red ring",
        "[8, 15, 103, 99]",
        "naïve 漢字 🙂\n\ttabs",
        "</think>\n<answer>[1, 2]",
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("103", add_special_tokens=False)["input_ids"])
    assert pieces == ["1", "0", "3"]
    assert len(tokenizer("</think>\n<answer>[10, 20, 30, 40]</answer>", add_special_tokens=False)["input_ids"]) == 17
    assert all(len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1 for token in SPECIAL_TOKENS)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_builder_makes_the_shipped_tokenizer_and_shapes(processor):
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert processor.chat_template == CHAT_TEMPLATE
    assert make_processor(tokenizer).image_processor.size == processor.image_processor.size
    model = make_model(tokenizer)
    shipped = AutoModelForImageTextToText.from_pretrained(TINY_PATH, dtype=torch.float32)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    assert {name: weight.shape for name, weight in shipped.state_dict().items()} == shapes
    # 0.08 within 5%: from 16,384 draws the standard error is 0.6%
    assert model.model.language_model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.08, rel=0.05)
