"""Bad input ends in one message that names the thing and the setting, with status 2, no traceback, and nothing lost."""

import hashlib
import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import families

from vlm_grpo import evaluate, sft, train
from vlm_grpo.common import program
from vlm_grpo.data.reader import epoch_indices
from vlm_grpo.runs.checkpoint import checkpoints, load_checkpoint
from vlm_grpo.tiny import TINY_PATH

ROOT = Path(__file__).parents[2]
STEP = ["num_thoughts=2", "num_answers=2", "max_thought_length=4", "max_answer_length=4"]
TRAIN = [*STEP, "task=exam:Exam", "max_steps=1", "prompts_per_step=2", "eval_split=", "save_steps=0", "output_dir=run"]
SFT = ["task=exam:Exam", "max_steps=1", "batch_size=2", "eval_split=", "output_dir=run"]
EVALUATE = ["max_thought_length=4", "max_answer_length=4", "task=exam:Exam", "output_dir=run"]

# A user's task; what is wrong with it is chosen by its arguments
EXAM = """
    import json
    import math
    from pathlib import Path

    from PIL import Image

    from vlm_grpo.task import Reward, Sample, TaskAdapter


    class Exam(TaskAdapter):
        def __init__(self, wrong="nothing", image="", count=3, question="Which colour?"):
            self.wrong, self.image, self.count, self.question = wrong, image, count, question

        def samples(self, split):
            if self.wrong == "samples":
                return json.loads(Path("missing.json").read_text())
            images = [Image.new("RGB", (40, 30), (90 * i, 0, 99)) for i in range(self.count)]
            if self.image:
                images[1] = Path(self.image)
            if self.wrong == "swapped":
                images.reverse()
            if self.wrong == "size":
                images[1] = Image.new("RGB", (0, 30))
            ids = [f"{split}-{0 if self.wrong == 'ids' else i}" for i in range(self.count)]
            samples = [Sample(id_, [image], self.question, None) for id_, image in zip(ids, images)]
            if self.wrong == "images":  # past the shape checks that only the tests run
                vars(samples[0])["images"] = Path("one.png")
            if self.wrong == "question":
                vars(samples[0])["question"] = 7
            if self.wrong == "long":
                vars(samples[1])["question"] = "Which colour is it, please? " * 20
            return samples

        def reward(self, sample, answer):
            if self.wrong == "flag" and Path("broken").exists() and sample.id == "train-2":
                raise ZeroDivisionError("no such luck")
            if self.wrong == "reward raises":
                raise ZeroDivisionError("no such luck")
            if self.wrong == "reward hangs up":
                raise SystemExit
            return {
                "reward is none": None,
                "reward is nan": Reward(math.nan),
                "reward is text": "good",
                "reward is truth": Reward(True),
            }.get(self.wrong, Reward(len(answer) % 5 / 4))

        def reference_answer(self, sample):
            return 5 if self.wrong == "reference" else "red"

        def metrics(self, samples, answers, rewards):
            if self.wrong == "metrics":
                return {"reward": 1 / 0}
            return super().metrics(samples, answers, rewards)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """An empty current directory with exam.py in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "exam.py").write_text(textwrap.dedent(EXAM))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("exam", "broken_task"):
            del sys.modules[name]


@pytest.fixture
def message_of(capsys, monkeypatch) -> Callable[..., str]:
    """Runs a program as from the command line; gives its one message after it has ended with status 2."""

    def call(main: Callable[[Sequence[str]], None], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["program", *options(main, *arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            program.run(main)
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert len(re.findall("^error: ", said, re.MULTILINE)) == 1 and "Traceback" not in said
        return said[said.index("error: ") :]

    return call


def options(main: Callable[[Sequence[str]], None], *arguments: str) -> list[str]:
    """The program's arguments: the defaults of these tests, replaced where `arguments` say otherwise."""
    defaults = {train.main: TRAIN, sft.main: SFT, evaluate.main: EVALUATE}[main]
    given = {argument.partition("=")[0] for argument in arguments}
    kept = [argument for argument in defaults if argument.partition("=")[0] not in given]
    return [*kept, *(argument for argument in arguments if not argument.endswith("=UNSET"))]


def assert_names(message: str, *expected: str) -> None:
    missing = [words for words in expected if words not in message]
    assert not missing, f"{missing} missing in {message!r}"


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- options ----


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_step=1", ["unknown option 'max_step'", "'max_steps'", "command line", "config=FILE.yaml"]),
        ("lr=1e-5", ["unknown option 'lr'", "here it is called learning_rate"]),
        ("batch_size=8", ["here it is called prompts_per_step, over all processes"]),
        ("num_train_epochs=3", ["here it is called max_steps, which counts steps"]),
        ("epochs=3", ["here it is called max_steps"]),
        ("num_generations=8", ["here it is called num_thoughts, with num_answers to each"]),
        ("task=refcoco,vqav2", ["task=[refcoco,vqav2]"]),
        ("task=exam.py:Exam", ["name the module, not its file: task=exam:Exam"]),
        ("task=./exam.py:Exam", ["task=exam:Exam"]),
        ("task=below/exam:Exam", ["task=exam:Exam", "in the folder where exam.py lies"]),
        ("task=exam.py", ["task=exam:MyTask"]),
        ("task_weights=3,1", ["'task_weights'", "'3,1'", "a list", "write task_weights=[3,1]"]),
        ("max_steps=many", ["'max_steps'", "'many'", "an integer"]),
        ("dtype=float64", ["'dtype'", "'float64'", "bfloat16"]),
        ("max_steps", ["'max_steps'", "key=value"]),
        ("max_steps=0", ["max_steps=0", "at least 1"]),
        ("prompts_per_step=0", ["prompts_per_step=0", "at least 1"]),
        ("prompts_per_minibatch=0", ["prompts_per_minibatch=0", "at least 1"]),
        ("max_thought_length=0", ["max_thought_length=0", "at least 1"]),
        ("temperature=0", ["temperature=0", "above 0"]),
        ("temperature=nan", ["temperature=nan", "above 0"]),
        ("top_p=0", ["top_p=0", "above 0 and at most 1"]),
        ("top_k=-1", ["top_k=-1", "at least 0"]),
        ("min_p=2", ["min_p=2", "from 0 to 1"]),
        ("learning_rate=nan", ["learning_rate=nan", "finite"]),
        ("warmup_steps=1", ["warmup_steps=1", "max_steps=1"]),
        ("learning_rate=-1e-5", ["learning_rate=-1e-05", "at least 0"]),
        ("adam_beta2=1", ["adam_beta2=1", "below 1"]),
        ("max_grad_norm=0", ["max_grad_norm=0", "above 0"]),
        ("max_skipped_steps=-1", ["max_skipped_steps=-1", "at least 0"]),
        ("beta=-1", ["beta=-1", "at least 0"]),
        ("save_steps=-1", ["save_steps=-1", "at least 0"]),
        ("save_total_limit=0", ["save_total_limit=0", "at least 1"]),
        ("max_samples=0", ["max_samples=0", "at least 1"]),
        ("lora_r=-1", ["lora_r=-1", "at least 0"]),
        ("max_pixels=0", ["max_pixels=0", "at least 1"]),
        ("max_pixels=2000", ["min_pixels=3136", "max_pixels=2000"]),
        ("max_thought_length=99999", ["max_thought_length", "99999", "context", "32768"]),
        ("max_prompt_length=0", ["max_prompt_length"]),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_can(message_of, here, argument: str, expected: list[str]) -> None:
    assert_names(message_of(train.main, argument), *expected)
    assert not (here / "run").exists()


def test_one_thought_with_one_answer_leaves_nothing_to_compare(message_of) -> None:
    assert_names(message_of(train.main, "num_thoughts=1", "num_answers=1"), "num_thoughts=1", "num_answers=1")


@pytest.mark.parametrize(
    ("main", "arguments", "expected"),
    [
        (sft.main, ["num_thoughts=8"], ["num_thoughts=8 does nothing", "supervised"]),
        (sft.main, ["warmup_steps=1"], ["warmup_steps=1", "max_steps=1"]),
        (train.main, ["lora_alpha=16"], ["lora_alpha=16 does nothing", "lora_r=0"]),
        (evaluate.main, ["num_thoughts=8"], ["num_thoughts=8 does nothing", "decoding=greedy", "decoding=sample"]),
        (evaluate.main, ["temperature=0.7"], ["temperature=0.7 does nothing", "decoding=sample"]),
        (evaluate.main, ["lora_r=8"], ["lora_r=8 does nothing", "evaluation"]),
        (evaluate.main, ["predictions=a.jsonl", "model=mine"], ["model=mine does nothing", "predictions=FILE"]),
        (evaluate.main, ["predictions=a.jsonl", "decoding=sample"], ["decoding=sample does nothing"]),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(message_of, here, main, arguments: list[str], expected) -> None:
    assert_names(message_of(main, *arguments), *expected)
    assert not (here / "run").exists()


def test_limits_of_the_held_out_split_are_named_by_their_own_option(message_of) -> None:
    for main in (train.main, sft.main):
        assert_names(message_of(main, "eval_split=val", "eval_samples=0"), "eval_samples=0", "at least 1")


def test_evaluation_and_warm_start_check_their_options_too(message_of) -> None:
    assert_names(message_of(evaluate.main, "temperature=0"), "temperature=0")
    assert_names(message_of(evaluate.main, "max_answer_length=0"), "max_answer_length=0")
    assert_names(message_of(evaluate.main, "splitt=val"), "'splitt'", "'split'")
    assert_names(message_of(sft.main, "learning_rate=inf"), "learning_rate=inf")
    assert_names(message_of(sft.main, "batch_size=0"), "batch_size=0")


def test_names_of_other_trainers_are_known_as_far_as_the_program_has_the_option(message_of) -> None:
    assert_names(message_of(sft.main, "per_device_train_batch_size=4"), "here it is called batch_size")
    assert "is called" not in message_of(evaluate.main, "num_train_epochs=4")


def test_pixel_limits_need_a_patch_grid(message_of) -> None:
    model = str(families.cached_folder("gemma3"))
    message = message_of(train.main, f"model={model}", "max_pixels=50000")
    assert_names(message, "min_pixels and max_pixels", "Gemma3ImageProcessor", "unset")


def test_a_configuration_file_is_named_with_what_is_wrong_in_it(message_of, here) -> None:
    assert_names(message_of(train.main, "config=none.yaml"), "config=none.yaml", "no such file", str(here))
    (here / "bad.yaml").write_text("max_steps: [1\n")
    assert_names(message_of(train.main, "config=bad.yaml"), "config=bad.yaml", "not valid YAML")
    (here / "odd.yaml").write_text("max_stepz: 1\n")
    assert_names(message_of(train.main, "config=odd.yaml"), "'max_stepz'", "in odd.yaml", "'max_steps'")


# ---- tasks and their data ----


def test_an_unknown_task_lists_the_known_ones_and_where_they_were_looked_for(message_of) -> None:
    message = message_of(train.main, "task=refcoc")
    assert_names(message, "unknown task 'refcoc'", "Did you mean 'refcoco'", str(ROOT / "tasks"), "my_module:MyTask")
    assert_names(message_of(train.main, "task=UNSET"), "task: name one of", "refcoco")
    assert_names(message_of(train.main, "task=exams:Exam"), "'exams'", "current directory")
    assert_names(message_of(train.main, "task=exam:Exan"), "'Exan'", "Exam")
    assert_names(message_of(train.main, "task_args.cuont=1"), "task_args.cuont", "'count'")


def test_a_task_file_with_two_adapters_asks_which_one(message_of, here, monkeypatch) -> None:
    import tasks

    exam = textwrap.dedent(EXAM)
    (here / "broken_task.py").write_text(
        exam + exam.partition("class ")[1] + exam.partition("class ")[2].replace("Exam", "Test")
    )
    monkeypatch.setattr(tasks, "__path__", [str(here)])
    message = message_of(train.main, "task=broken_task")
    monkeypatch.delattr(tasks, "broken_task")
    del sys.modules["tasks.broken_task"]
    assert_names(message, "broken_task.py", "exactly one", "Exam, Test", "task=tasks.broken_task:ClassName")


def test_missing_data_are_named_with_the_way_to_get_them(message_of, here) -> None:
    message = message_of(train.main, "task=refcoco", "task_args.data=coco")
    assert_names(message, "task_args.data", "'coco'", "data_scripts")
    (here / "coco").mkdir()
    assert_names(message_of(train.main, "task=refcoco", "task_args.data=coco"), "coco/train.jsonl is missing")
    model = str(families.cached_folder("qwen2_vl"))
    message = message_of(train.main, "task=refcoco", f"model={model}")  # scenes are for the shipped model alone
    assert_names(message, "refcoco has no data", "task_args.data", "data_scripts")
    message = message_of(train.main, "task_args.wrong=samples")
    assert_names(message, "exam:Exam", "samples('train')", "FileNotFoundError", "missing.json")


def test_an_unknown_split_lists_the_splits(message_of) -> None:
    assert_names(message_of(train.main, "task=refcoco", "train_split=tarin"), "'tarin'", "train")
    message = message_of(sft.main, "task=refcoco", "task_args.limit=3", "eval_split=vall")
    assert_names(message, "'vall'", "val")
    assert_names(message_of(evaluate.main, "task=refcoco", "split=testQ"), "'testQ'", "test")


@pytest.mark.parametrize("main", [train.main, sft.main], ids=["train", "sft"])
def test_a_split_without_a_file_is_named_by_its_setting(message_of, here, main) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "test.jsonl").touch()
    arguments = ["task=gsm8k", "task_args.data=mine"]
    message = message_of(main, *arguments, "train_split=trian")
    assert_names(message, "train_split=trian: ", "mine/trian.jsonl is missing", "splits in mine: test")
    row = {"id": "a", "question": "1 + 1?", "answer": "2", "solution": "#### 2", "number": "2"}
    (here / "mine" / "train.jsonl").write_text(json.dumps(row) + "\n")
    message = message_of(main, *arguments, "eval_split=UNSET")
    assert_names(message, "eval_split=val: ", "mine/val.jsonl is missing", "eval_split= for none")


@pytest.mark.parametrize("word", ["", "none", "null"])
def test_no_held_out_split_is_asked_for_by_a_word_too(here, word: str) -> None:
    train.main(options(train.main, f"eval_split={word}"))
    assert "eval/reward" not in (here / "run" / "metrics.jsonl").read_text()


def test_an_empty_split_and_equal_ids_are_named(message_of) -> None:
    assert_names(message_of(train.main, "task_args.count=0"), "split 'train' is empty", "task_args")
    assert_names(message_of(train.main, "task_args.wrong=ids"), "'train-0'", "items 0 and 1", "unique")


# ---- samples ----


def corrupt(path: Path) -> None:
    path.write_bytes(b"GIF89a, said the file")


def truncated(path: Path) -> None:
    families.noise_images(1)[0].save(path)
    path.write_bytes(path.read_bytes()[:900])


def flat(path: Path) -> None:
    Image.new("RGB", (1, 5000)).save(path)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (corrupt, ["picture.png", "cannot be read"]),
        (truncated, ["picture.png", "truncated"]),
        (lambda path: None, ["picture.png", "No such file"]),
        (flat, ["1×5000", "aspect ratio"]),
    ],
)
def test_a_bad_image_names_its_sample(message_of, here, write: Callable[[Path], object], expected: list[str]) -> None:
    write(here / "picture.png")
    message = message_of(train.main, "task_args.image=picture.png", "prompts_per_step=3")
    assert_names(message, "sample 'train-1'", "on_bad_sample", *expected)


@pytest.mark.parametrize("main", [train.main, sft.main, evaluate.main], ids=["train", "sft", "evaluate"])
def test_a_bad_image_is_skipped_counted_and_named_if_asked_for(message_of, here, capsys, main) -> None:
    corrupt(here / "picture.png")
    split = "val" if main is evaluate.main else "train"
    whole = {train.main: ["prompts_per_step=3"], sft.main: ["batch_size=3"], evaluate.main: []}[main]
    assert_names(message_of(main, "task_args.image=picture.png", *whole), f"sample '{split}-1'", "on_bad_sample")
    main(options(main, "task_args.image=picture.png", "on_bad_sample=skip", *whole))
    said = capsys.readouterr().err
    assert said.count(f"skipped: sample '{split}-1'") == 1 and "picture.png" in said
    if main is evaluate.main:
        written = json.loads((here / "run" / "metrics.json").read_text())
        assert written["num_samples"] == 2 and written["notes"]["skipped_bad_samples"] == "1"
    else:
        row = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["skipped_bad_samples"] == 1
        assert row.get("num_prompts", 2) == 2, "no other sample takes its place"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("size", ["0×30 pixels"]),
        ("images", ["images is", "list"]),
        ("question", ["question is 7", "text"]),
    ],
)
def test_a_sample_of_the_wrong_form_is_named(message_of, wrong: str, expected: list[str]) -> None:
    message = message_of(train.main, f"task_args.wrong={wrong}", "prompts_per_step=3")
    assert_names(message, "sample '", *expected)


def test_image_marks_in_a_question_are_refused_since_they_would_move_the_images(message_of) -> None:
    message = message_of(train.main, "task_args.question=<|image_pad|> What is this?")
    assert_names(message, "sample 'train-", "'<|image_pad|>'", "question")


def test_a_question_too_long_is_named_or_skipped_but_never_cut(message_of, here, capsys) -> None:
    long = ["task_args.wrong=long", "max_prompt_length=100", "prompts_per_step=3"]
    message = message_of(train.main, *long)
    assert_names(message, "sample 'train-1'", "tokens, more than 100", "max_prompt_length", "on_long_prompt=skip")
    train.main(options(train.main, *long, "on_long_prompt=skip"))
    assert "skipped: sample 'train-1'" in capsys.readouterr().err
    row = json.loads((here / "run" / "metrics.jsonl").read_text())
    assert (row["skipped_long_prompts"], row["num_prompts"]) == (1, 2)


@pytest.mark.parametrize("main", [train.main, sft.main], ids=["train", "sft"])
def test_a_run_of_which_every_sample_is_skipped_ends_with_the_reason(message_of, here, main) -> None:
    few = {train.main: "prompts_per_step=2", sft.main: "batch_size=2"}[main]
    long = [few, "max_steps=9", "max_prompt_length=5", "on_long_prompt=skip"]
    message = message_of(main, *long)
    assert_names(message, "no sample could be used", "on_long_prompt=skip left out 4", "sample 'train-", "more than 5")
    assert not (here / "run" / "model.safetensors").exists()
    (here / "picture.png").touch()
    bad = [few, "max_samples=1", "on_bad_sample=skip", "output_dir=other", "task_args.count=2"]
    message = message_of(main, *bad, "task_args.image=picture.png", "task_args.wrong=swapped")
    assert_names(message, "no sample could be used", "on_bad_sample=skip left out 2", "picture.png")


def test_after_a_run_that_used_no_sample_the_folder_is_free(message_of, here) -> None:
    assert_names(message_of(train.main, "max_steps=9", "max_prompt_length=5", "on_long_prompt=skip"), "no sample")
    assert len((here / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    train.main(options(train.main))


# ---- rewards ----


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("reward raises", ["ZeroDivisionError: no such luck", "exam.py"]),
        ("reward is text", ["returned 'good'", "Reward(value=...)"]),
        ("reward is truth", ["Reward.value is True", "number"]),
    ],
)
@pytest.mark.parametrize("main", [train.main, evaluate.main], ids=["train", "evaluate"])
def test_a_reward_that_is_none_of_ours_names_task_and_sample(message_of, main, wrong: str, expected: list[str]) -> None:
    assert_names(message_of(main, f"task_args.wrong={wrong}"), "task exam:Exam", "sample '", *expected)


@pytest.mark.parametrize("wrong", ["reward is none", "reward is nan"])
def test_an_answer_without_reward_teaches_nothing_and_enters_no_mean(here, wrong: str) -> None:
    train.main(options(train.main, f"task_args.wrong={wrong}", "weight_decay=0.1"))
    row = json.loads((here / "run" / "metrics.jsonl").read_text())
    assert (row["answers_without_reward"], row["reward"], row["grad_norm"]) == (8, None, 0)
    before, after = load_file(TINY_PATH / "model.safetensors"), load_file(here / "run" / "model.safetensors")
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    evaluate.main(options(evaluate.main, f"task_args.wrong={wrong}", "output_dir=evaluation"))
    written = json.loads((here / "evaluation" / "metrics.json").read_text())
    assert (written["num_samples"], written["num_without_reward"]) == (0, 3) and "reward" not in written


def test_what_else_a_task_may_do_wrong_is_named(message_of) -> None:
    assert_names(
        message_of(evaluate.main, "task_args.wrong=metrics"), "task exam:Exam", "metrics()", "ZeroDivisionError"
    )
    assert_names(
        message_of(sft.main, "task_args.wrong=reference", "output_dir=warm"),
        "task exam:Exam",
        "sample '",
        "must be text",
    )


def test_an_answer_without_a_box_scores_zero_and_counts(here) -> None:
    ids = [f"test-0-{index:06d}" for index in range(3)]
    answers = ["no box at all", "[1, 2", ""]
    lines = [json.dumps({"id": i, "answer": answer}) for i, answer in zip(ids, answers, strict=True)]
    (here / "answers.jsonl").write_text("\n".join(lines))
    arguments = ["task=refcoco", "task_args.data=scenes", "split=test", "max_samples=3", "output_dir=run"]
    evaluate.main([*arguments, "predictions=answers.jsonl"])
    written = json.loads((here / "run" / "metrics.json").read_text())
    assert {name: written[name] for name in ("acc@0.5", "mean_iou", "parsed", "num_samples", "num_missing")} == {
        "acc@0.5": 0,
        "mean_iou": 0,
        "parsed": 0,
        "num_samples": 3,
        "num_missing": 0,
    }


# ---- models ----


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def incomplete(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[min(name for name in weights if "layernorm" in name)]
    save_file(weights, path, {"format": "pt"})


def unknown_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_weights, ["model=copy", "model.safetensors"]),
        (torn, ["model=copy", "deserializing header"]),
        (incomplete, ["model=copy", "lack 1 weights", "layers.0.input_layernorm.weight"]),
        (unknown_family, ["family 'bert'", "qwen2_5_vl", "families.py"]),
    ],
)
def test_model_files_that_cannot_be_used_are_named(message_of, here, change, expected: list[str]) -> None:
    shutil.copytree(TINY_PATH, here / "copy", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    change(here / "copy")
    assert_names(message_of(train.main, "model=copy"), *expected)


@pytest.mark.parametrize("model", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "nowhere/"])
def test_a_model_folder_that_does_not_exist_is_named(message_of, here, model: str) -> None:
    for main in (train.main, evaluate.main):
        assert_names(message_of(main, f"model={model}"), f"model={model}: there is no such folder", str(here))


@pytest.mark.parametrize("model", ["nowhere", "no/where"])
def test_a_name_that_is_no_folder_while_the_hub_is_out_of_reach(here, model: str) -> None:
    with socket.socket() as closed:  # bound and deaf: every connection is refused
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        began = time.monotonic()
        done = shell(
            here,
            sys.executable,
            "-m",
            "vlm_grpo.train",
            *TRAIN,
            f"model={model}",
            HF_HUB_OFFLINE="0",
            HF_ENDPOINT=address,
        )
    assert done.returncode == 2 and done.stderr.startswith(f"error: model={model}: there is no folder")
    assert_names(done.stderr, f"the hub ({address}) cannot be reached")
    assert done.stderr.count("\n") == 1, "no line for each of many tries"
    assert time.monotonic() - began < 60


# ---- predictions ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2", ["line 1", '"id"', '"answer"']),
        ('{"id": "val-0"}', ["line 1", '"answer"']),
        ('{"id": "val-0", "answer": 3}', ["line 1", "'val-0'", "not text"]),
        ('{"id": "nobody", "answer": ""}', ["line 1", "'nobody'", "of none of the 3 samples"]),
        ('{"id": ["val-0"], "answer": ""}', ["line 1", "['val-0']", "of none of the 3 samples"]),
        ('{"id": "val-0", "answer": ""}\n\n{"id": "val-0", "answer": ""}', ["line 3", "'val-0'", "twice"]),
    ],
)
def test_a_line_that_is_no_prediction_is_named(message_of, here, text: str, expected: list[str]) -> None:
    (here / "answers.jsonl").write_text(text)
    assert_names(message_of(evaluate.main, "predictions=answers.jsonl"), "predictions=answers.jsonl", *expected)


def test_a_predictions_file_that_cannot_be_read_is_named(message_of, here) -> None:
    assert_names(message_of(evaluate.main, "predictions=none.jsonl"), "predictions=none.jsonl", "No such file")
    (here / "bytes").write_bytes(b"\xff\xfe\x00")
    assert_names(message_of(evaluate.main, "predictions=bytes"), "predictions=bytes", "cannot be read")


# ---- folders and disks ----


def test_the_folder_of_another_run_is_left_as_it_is(message_of, here) -> None:
    train.main(TRAIN)
    before = fingerprint(here / "run")
    assert_names(message_of(train.main), "output_dir=run", "another run", "resume_from_checkpoint=true")
    message = message_of(sft.main)
    assert_names(message, "output_dir=run", "another run", "set another output_dir")
    assert "resume_from_checkpoint" not in message, "an option that a supervised run does not have"
    message = message_of(train.main, "resume_from_checkpoint=true", "learning_rate=0.5")
    assert_names(message, "output_dir=run", "learning_rate was 0.0002, is now 0.5")
    message = message_of(train.main, "resume_from_checkpoint=elsewhere/checkpoint-3")
    assert_names(message, "resume_from_checkpoint=elsewhere/checkpoint-3", "no complete checkpoint")
    assert fingerprint(here / "run") == before


def test_an_output_folder_that_cannot_be_is_named(message_of, here) -> None:
    (here / "file").write_text("mine")
    for main in (train.main, sft.main):
        assert_names(message_of(main, "output_dir=file"), "output_dir=file", "is a file")
        assert_names(message_of(main, "output_dir=file/below"), "file/below")
    assert_names(message_of(evaluate.main, "output_dir=file/below"), "output_dir=file/below")
    assert (here / "file").read_text() == "mine"


LONG_RUN = ["max_steps=3", "save_steps=1"]


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_reward_that_fails_on_the_way_costs_nothing_but_its_step(message_of, here) -> None:
    seed = next(s for s in range(9) if epoch_indices(total=3, first=1, count=1, seed=s) == [2])
    arguments = [*LONG_RUN, "prompts_per_step=1", f"seed={seed}", "task_args.wrong=flag"]
    train.main(options(train.main, *arguments, "output_dir=unbroken"))
    (here / "broken").touch()
    assert_names(message_of(train.main, *arguments), "task exam:Exam", "sample 'train-2'")
    assert [path.name for path in checkpoints(here / "run")] == ["checkpoint-1"]
    (here / "broken").unlink()
    train.main(options(train.main, *arguments, "resume_from_checkpoint=true"))
    assert_same_weights(here / "run", here / "unbroken")


def test_a_run_that_goes_on_for_longer_is_the_longer_run(here) -> None:
    train.main(options(train.main, *LONG_RUN, "output_dir=unbroken"))
    train.main(options(train.main, "max_steps=2", "save_steps=1"))
    train.main(options(train.main, *LONG_RUN, "resume_from_checkpoint=true"))
    assert_same_weights(here / "run", here / "unbroken")


def test_a_full_disk_while_saving_loses_nothing(message_of, here, monkeypatch) -> None:
    train.main(options(train.main, *LONG_RUN, "output_dir=unbroken"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = train.Run.save

    def save_on_a_full_disk(self: train.Run, step: int) -> None:
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # a real refused write, needs no root
        save(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(train.Run, "save", save_on_a_full_disk)
        try:
            message = message_of(train.main, *LONG_RUN)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_names(message, "run/checkpoint-2", "free space", "output_dir", "resume_from_checkpoint=true")
    assert [load_checkpoint(folder).step for folder in checkpoints(here / "run")] == [1]
    train.main(options(train.main, *LONG_RUN, "resume_from_checkpoint=true"))
    assert_same_weights(here / "run", here / "unbroken")


# ---- from the shell ----


def shell(here: Path, *command: str, **more: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HOME": str(here), **more}
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)


def test_the_shell_sees_one_line_and_status_2(here) -> None:
    done = shell(here, sys.executable, "-m", "vlm_grpo.train", "max_step=1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown option 'max_step'") and done.stderr.count("\n") == 1


def test_the_launcher_passes_the_message_on_and_fails(here) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet", "--num_processes=1"]
    done = shell(here, *launcher, "-m", "vlm_grpo.train", *TRAIN, "task_args.wrong=reward raises")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert_names(done.stderr, "error: task exam:Exam, sample 'train-", "ZeroDivisionError")
