"""Evaluation: greedy answers are those of `generate`, every number is as defined, and its files say how it was made."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support import families
from support.exact import inputs_of
from support.forks import Forks, forks
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tasks.refcoco import RefCOCO
from vlm_grpo.algorithm.trainer import step_seed
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import check_ranges
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.evaluate import evaluate, main, prompt_limit, score_predictions
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.evaluation.predictions import read_predictions
from vlm_grpo.model.coordinates import answer_in_original
from vlm_grpo.model.load import load_vlm, model_path
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.sampling import SamplingConfig
from vlm_grpo.task import Reward, Sample, TaskAdapter
from vlm_grpo.train import TrainConfig

BOXES = [(10.0, 20.0, 50.0, 60.0), (0.0, 0.0, 40.0, 20.0), (30.0, 30.0, 60.0, 90.0), (5.0, 5.0, 25.0, 45.0)]


def write_data(folder: Path, corrupt: Sequence[int] = ()) -> Path:
    """A split `val` of four rows, images of 80 × 100 pixels."""
    folder.mkdir()
    rows = []
    for index, box in enumerate(BOXES):
        Image.new("RGB", (80, 100), (60 * index, 90, 120)).save(folder / f"{index}.png")
        if index in corrupt:
            (folder / f"{index}.png").write_bytes(b"no image")
        rows.append({"id": f"row-{index}", "image": f"{index}.png", "expression": "the red box", "bbox_xyxy": box})
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_predictions(path: Path, answers: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps({"id": key, "answer": answer}) for key, answer in answers.items()) + "\n\n")
    return path


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    return json.loads((folder / "metrics.json").read_text()), [json.loads(line) for line in lines]


def test_a_file_of_predictions_is_scored_without_a_model(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("vlm_grpo.evaluate.load_vlm", lambda *_: pytest.fail("a model was loaded"))
    data = write_data(tmp_path / "data", corrupt=[0])  # nor is an image opened
    answers = {
        "row-1": "[0, 0, 20, 20]",  # half of the box: IoU 1/2, a hit by IoU >= 0.5
        "row-0": "[10, 20, 50, 60]",  # the box
        "row-2": "somewhere on the left",  # no box: IoU 0
    }  # none for row-3: IoU 0
    file = write_predictions(tmp_path / "answers.jsonl", answers)
    out = tmp_path / "out"
    main(["task=refcoco", f"task_args={{data: {data}}}", "split=val", f"predictions={file}", f"output_dir={out}"])
    metrics, predictions = read(out)
    assert metrics["acc@0.5"] == 2 / 4
    assert metrics["mean_iou"] == pytest.approx(1.5 / 4)
    assert metrics["parsed"] == 2 / 4
    assert (metrics["num_samples"], metrics["num_missing"]) == (4, 1)
    assert [p["id"] for p in predictions] == ["row-0", "row-1", "row-2", "row-3"]
    assert [p["answer"] for p in predictions] == [answers.get(f"row-{i}", "") for i in range(4)]
    assert [p["reward"] for p in predictions] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert predictions[1]["parts"] == {"iou": 0.5, "acc@0.5": 1.0, "parsed": 1.0}
    printed = capsys.readouterr().out
    assert "IoU >= 0.5" in metrics["notes"]["metric"] and metrics["notes"]["metric"] in printed
    assert "num_samples" in printed and str(out) in printed


def test_predictions_leave_alone_what_a_model_has_begun_in_their_folder(tmp_path: Path) -> None:
    begun = tmp_path / "out/partial/rank-0.jsonl"
    begun.parent.mkdir(parents=True)
    begun.write_text("hours of answers\n")
    file = write_predictions(tmp_path / "answers.jsonl", {"row-1": "[0, 0, 40, 20]"})
    args = f"task_args={{data: {write_data(tmp_path / 'data')}}}"
    main(["task=refcoco", args, f"predictions={file}", f"output_dir={tmp_path / 'out'}", "bootstrap_samples=9"])
    assert begun.read_text() == "hours of answers\n"


def test_predictions_of_other_programs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": 7, "answer": "a"}\r\n\r\n{"id": "8", "answer": "b"}\r\n')
    assert read_predictions(file, ["7", "8"]) == {("7", 0, 0): "a", ("8", 0, 0): "b"}
    (data := write_data(tmp_path / "data")).joinpath("val.jsonl").write_bytes(
        b"\xef\xbb\xbf" + (data / "val.jsonl").read_bytes().replace(b"\n", b"\r\n")
    )
    assert len(RefCOCO(data=str(data)).samples("val")) == 4


def test_the_whole_text_of_a_model_is_scored_by_its_answer(tmp_path: Path) -> None:
    whole = "\n<think>[10, 20, 50, 60]</think> <answer> [0, 0, 20, 20] </answer>"
    file = write_predictions(tmp_path / "answers.jsonl", {"row-0": whole})
    assert read_predictions(file, ["row-0"]) == {("row-0", 0, 0): "[0, 0, 20, 20]"}
    for text, answer in (
        ("the red one</think>\n<answer>[0, 0, 20, 20]</answer>", "[0, 0, 20, 20]"),  # of a prompt that ends in <think>
        ("the red one</think> [0, 0, 20, 20]", "[0, 0, 20, 20]"),
        ("It is <answer>yes</answer>.", "yes"),
        ("yes</answer>", "yes"),
        ("<think>the red", ""),
        ("  a < b, or b > c\n", "  a < b, or b > c\n"),  # as it is: no tags
    ):
        write_predictions(file, {"row-0": text})
        assert read_predictions(file, ["row-0"]) == {("row-0", 0, 0): answer}
    file.write_text(json.dumps({"id": "row-0", "answer": whole, "model_answer": whole}))
    assert read_predictions(file, ["row-0"]) == {("row-0", 0, 0): whole}, "an evaluation's own file"


def test_what_a_file_of_predictions_lacks_is_said_beside_the_number(tmp_path: Path) -> None:
    file = write_predictions(tmp_path / "answers.jsonl", {"row-1": "[0, 0, 40, 20]"})
    args = ["task=refcoco", f"task_args={{data: {write_data(tmp_path / 'data')}}}", f"predictions={file}"]
    main([*args, f"output_dir={tmp_path / 'out'}"])
    table = (tmp_path / "out" / "summary.md").read_text()
    assert "answers.jsonl, which lacks 3" in table
    file.write_text("\n")
    with pytest.raises(UserError, match=r"answers\.jsonl: it holds no line"):
        main([*args, f"output_dir={tmp_path / 'none'}"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_makes_no_generator_is_refused(seed: int) -> None:
    with pytest.raises(UserError, match=rf"seed={seed}: must be from 0 to 4294967295"):
        main(["task=refcoco", f"seed={seed}"])
    with pytest.raises(UserError, match=rf"seed={seed}: must be"):
        check_ranges(TrainConfig(seed=seed))
    check_ranges(TrainConfig(seed=2**32 - 1))
    torch.Generator().manual_seed(step_seed(2**32 - 1, 10**6, 1000))


@pytest.mark.parametrize(("protocol", "accuracy", "words"), [("standard", 0.5, ">= 0.5"), ("vlm-r1", 0.25, "> 0.5")])
def test_the_threshold_rule_is_the_protocols_and_is_printed(
    tmp_path: Path, capsys, protocol: str, accuracy: float, words: str
) -> None:
    data = write_data(tmp_path / "data")
    # of 41 × 21 pixels under vlm-r1's wider boxes: 861 / 2 = 430.5 are hit exactly by 20.5 × 21
    half = "[0, 0, 20.5, 21]" if protocol == "vlm-r1" else "[0, 0, 20, 20]"
    grown = "[10, 20, 51, 61]" if protocol == "vlm-r1" else "[10, 20, 50, 60]"
    file = write_predictions(tmp_path / "answers.jsonl", {"row-0": grown, "row-1": half})
    out = tmp_path / "out"
    args = f"task_args={{data: {data}, protocol: {protocol}}}"
    main(["task=refcoco", args, f"predictions={file}", f"output_dir={out}"])
    metrics, predictions = read(out)
    assert {p["id"]: p["reward"] for p in predictions}["row-1"] == 0.5
    assert metrics["acc@0.5"] == accuracy
    assert f"IoU {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not of the form"),
        ('["row-1", "x"]', "line 2: not of the form"),
        ('{"id": "row-1"}', "line 2: not of the form"),
        ('{"id": "row-1", "answer": 7}', "line 2: the answer of id 'row-1' is 7"),
        ('{"id": "row-9", "answer": ""}', "line 2: the id 'row-9' is of none of the 4 samples"),
        ('{"id": "row-0", "answer": ""}', "line 2: the id 'row-0' is twice"),
    ],
)
def test_bad_lines_of_predictions_are_named(tmp_path: Path, line: str, message: str) -> None:
    task = RefCOCO(data=str(write_data(tmp_path / "data")))
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": "row-0", "answer": "[0, 0, 1, 1]"}\n' + line)
    with pytest.raises(UserError, match=message):
        score_predictions(task, task.samples("val"), file)
    with pytest.raises(UserError, match="cannot be read"):
        score_predictions(task, task.samples("val"), tmp_path / "absent.jsonl")


class Lengths(TaskAdapter):
    """The reward is the number of words; an answer with the letter q has none."""

    def samples(self, split: str) -> Sequence[Sample]:
        return [Sample(name, [], "Say something", None) for name in ("a", "b", "c")]

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        words = float(len(answer.split()))
        return None if "q" in answer else Reward(words, {"two": float(words == 2)})

    def reference_answer(self, sample: Sample) -> str:
        return "x"


def test_default_metrics_are_means_over_the_answers_with_a_reward(tmp_path: Path) -> None:
    task = Lengths()
    file = write_predictions(tmp_path / "answers.jsonl", {"a": "two words", "b": "q", "c": ""})
    metrics = score_predictions(task, task.samples("val"), file).metrics
    assert metrics == {"reward": 1.0, "two": 0.5, "num_samples": 2.0, "num_without_reward": 1.0, "num_missing": 0.0}


def test_answers_are_those_of_plain_generation() -> None:
    """`generate` up to the closing tag or the limit, then the forced words, then `generate` again."""
    config = EvaluateConfig(task="refcoco", max_thought_length=20, max_answer_length=16)
    vlm = load_vlm(config, 1.0, torch.device("cpu"))
    task = RefCOCO(data="scenes", limit=3)
    samples = task.samples("val")
    reader = PromptReader(vlm.prompts, task, config, prompt_limit(vlm, config, None))
    evaluation = evaluate(vlm, task, samples, reader, config, Processes())
    plain = AutoModelForImageTextToText.from_pretrained(model_path("tiny"), dtype=torch.float32)

    def generate(inputs: dict[str, Tensor], limit: int, tag: str) -> tuple[Tensor, str, bool]:
        ids = families.greedy(plain, inputs, limit, vlm.forbidden.tolist())
        decoded = [vlm.tokenizer.decode(ids[: n + 1], skip_special_tokens=True) for n in range(len(ids))]
        stop = next((n + 1 for n, text in enumerate(decoded) if tag in text), len(ids))
        text, closed, _ = decoded[stop - 1].partition(tag)
        return ids[:stop], text.strip(), bool(closed)

    ious = []
    for sample, prediction in zip(samples, evaluation.predictions, strict=True):
        prompt = vlm.prompts.build(sample, coordinates=True)
        inputs = inputs_of(vlm, prompt)
        ids, thought, closed = generate(inputs, config.max_thought_length, "</think>")
        forced = "\n<answer>" if closed else "\n</think>\n<answer>"
        bridge = torch.tensor(vlm.tokenizer.encode(forced, add_special_tokens=False))
        longer = families.extended(inputs, torch.cat([ids, bridge]))
        _, answer, _ = generate(longer, config.max_answer_length, "</answer>")
        assert (prediction.thought, prediction.model_answer) == (thought, answer)
        assert prediction.answer == answer_in_original(prompt, answer)
        ious.append(task.reward(sample, prediction.answer).value)
    assert evaluation.metrics["mean_iou"] == pytest.approx(sum(ious) / 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("evaluations")) as started:
        yield started


OPTIONS = {"task": "refcoco", "split": "val", "max_samples": 5, "max_thought_length": 16, "max_answer_length": 20}


@pytest.mark.parametrize("slots", [32, 1])
def test_two_processes_give_the_result_of_one(server: Forks, slots: int) -> None:
    """Five samples: unequal shares. Fewer batch slots: other batches."""
    found = []
    for processes in (1, 2):
        name = f"slots-{slots}-{processes}"
        options = OPTIONS | {"output_dir": name, "rollout_lanes": slots}
        assert server.run("evaluate", name, options, processes) == [0] * processes, server.log(name)
        found.append(read(server.folder / name))
    assert found[0] == found[1]
    assert len(found[0][1]) == 5 and found[0][0]["num_samples"] == 5
    printed = server.log(f"slots-{slots}-2")
    assert printed.count("written: ") == 1, "one process talks"


def test_what_moves_the_number_is_printed_and_kept(server: Forks) -> None:
    options = OPTIONS | {"output_dir": "noted", "max_samples": 2, "max_pixels": 6272}
    assert server.run("evaluate", "noted", options) == [0], server.log("noted")
    metrics, _ = read(server.folder / "noted")
    notes, printed = metrics["notes"], server.log("noted")
    for note in notes.values():
        assert note in printed
    assert "<|image_pad|>" in notes["prompt"] and "<think>" in notes["prompt"]
    assert "6272" in notes["image size"]
    assert notes["coordinates"] == "resized_pixels"
    assert "IoU >= 0.5" in notes["metric"] and "greedy" in notes["decoding"]
    assert "num_samples" in printed and metrics["num_samples"] == 2
    assert "max_pixels: 6272" in (server.folder / "noted" / "evaluation.yaml").read_text()


def test_skipped_samples_are_counted_named_and_left_out(server: Forks) -> None:
    data = write_data(server.folder / "partly-corrupt", corrupt=[0, 3])
    options = OPTIONS | {"output_dir": "skipping", "task_args": f"{{data: {data}}}", "max_samples": "null"}
    assert server.run("evaluate", "refusing", options) == [2]
    assert "sample 'row-0'" in server.log("refusing") and "Traceback" not in server.log("refusing")
    assert not (server.folder / "skipping").exists()
    options["on_bad_sample"] = "skip"
    assert server.run("evaluate", "skipping", options, processes=2) == [0, 0], server.log("skipping")
    metrics, predictions = read(server.folder / "skipping")
    assert [p["id"] for p in predictions] == ["row-1", "row-2"]
    assert metrics["num_samples"] == 2
    assert metrics["notes"]["skipped_bad_samples"] == "2"
    assert all(f"sample 'row-{i}'" in server.log("skipping") for i in (0, 3))
    options |= {"output_dir": "nothing", "max_samples": 1}
    assert server.run("evaluate", "nothing", options) == [2]
    assert "refcoco-val: not one of 1 samples could be read" in server.log("nothing")
    assert not (server.folder / "nothing" / "metrics.json").exists()


def test_long_prompts_are_counted_or_refused() -> None:
    vlm = VLM(families.load_model("gpt2", torch.float32), families.load_processor("gpt2"))
    task = Lengths()
    config = SamplingConfig(max_thought_length=2, max_answer_length=2)
    samples = [*task.samples("val"), Sample("long", [], "word " * 200, None)]
    reader = PromptReader(vlm.prompts, task, DataConfig(on_long_prompt="skip"), 200)
    evaluation = evaluate(vlm, task, samples, reader, config, Processes())
    assert [p.id for p in evaluation.predictions] == ["a", "b", "c"]
    assert (reader.skipped.long, reader.skipped.bad) == (1, 0)
    with pytest.raises(UserError, match=r"'long'.* tokens, more than 200.*max_prompt_length"):
        evaluate(vlm, task, samples, PromptReader(vlm.prompts, task, DataConfig(), 200), config, Processes())
