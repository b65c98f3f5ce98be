"""The classic exercise: generated word problems, a tiny GPT-2 for them, and GRPO with a right-or-wrong reward."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families

from data_scripts import gsm8k as official
from data_scripts import tiny_arithmetic
from tasks._generated.problems import make_sum
from tasks.gsm8k import GSM8K
from vlm_grpo import evaluate, sft
from vlm_grpo.common.config import load_config
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.load import load_vlm
from vlm_grpo.task import Reward, check_task
from vlm_grpo.train import TrainConfig, train
from vlm_grpo.tree.tags import FORMAT

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"train": 120, "test": 24, "warm": 120}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes: three splits and a model."""
    folder = tmp_path_factory.mktemp("arithmetic")
    tiny_arithmetic.convert({"out": str(folder)} | {split: str(count) for split, count in SIZES.items()})
    return folder


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def solved(question: str) -> int:
    """The story told in numbers, by what its sentences say."""
    amounts = [int(number) for number in re.findall(r"\d+", question)]
    if "twice as many" in question:
        return sum(amounts) * 2
    if "together" in question:
        first, more = amounts
        return first + first + more
    return sum(amounts) - 2 * sum(int(number) for number in re.findall(r"away (\d+)", question))


# ---- the data ----


def test_generated_problems_are_gsm8k_rows_whose_last_number_solves_the_story(data: Path) -> None:
    for split, count in SIZES.items():
        assert len(rows(data, split)) == count
        for row in rows(data, split):
            assert list(row) == ["id", "question", "answer"]
            steps, marker, final = row["answer"].rpartition("\n#### ")
            assert marker and re.findall(r"(\d+) \w+\.$", steps) == [final]
            assert split == "warm" or final == str(solved(row["question"]))
            for expression, result, said in re.findall(r"<<(.*?)=(\d+)>>(\d+)", steps):
                assert re.fullmatch(r"\d+[-+*]\d+", expression)
                assert eval(expression) == int(result) == int(said)
            assert len(re.findall("<<", steps)) == len(steps.splitlines()) in (1, 2)


def test_four_in_five_of_the_two_step_solutions_to_warm_up_on_end_after_the_first_step(data: Path) -> None:
    whole = {row["question"]: row["answer"] for row in rows(data, "train") if row["answer"].count("<<") == 2}
    assert 0.4 < len(whole) / SIZES["train"] < 0.8, "three of five kinds have two steps"
    of_two = [row for row in rows(data, "warm") if re.search("away|finds|together", row["question"])]
    cut = [row for row in of_two if row["answer"].count("<<") == 1]
    assert 0.6 < len(cut) / len(of_two) < 0.97
    assert all(row["answer"].endswith(str(solved(row["question"]))) for row in of_two if row not in cut)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_problem_that_can_be_drawn_is_consistent(rng: Any) -> None:
    problem = tiny_arithmetic.make_problem(rng)
    answer = solved(problem["question"])
    assert problem["answer"].endswith(f"\n#### {answer}")
    assert 0 <= answer <= 27
    first, *_ = problem["answer"].splitlines()
    assert tiny_arithmetic.hasty(problem)["answer"].startswith(f"{first}\n#### ")
    assert set(re.findall(tiny_arithmetic.PIECES, problem["question"])) <= set(tiny_arithmetic.words())


def test_splits_share_no_question_and_depend_on_the_seed_alone(data: Path, tmp_path: Path) -> None:
    questions = [row["question"] for split in SIZES for row in rows(data, split)]
    assert len(set(questions)) == len(questions) == sum(SIZES.values())
    for folder, seed in (("same", "0"), ("other", "1")):
        options = {"out": str(tmp_path / folder), "seed": seed} | {name: str(n) for name, n in SIZES.items()}
        tiny_arithmetic.convert(options)
    for split in SIZES:
        same, other = ((tmp_path / folder / f"{split}.jsonl").read_bytes() for folder in ("same", "other"))
        assert same == (data / f"{split}.jsonl").read_bytes() != other
    same, other = ((tmp_path / f / "model" / "model.safetensors").read_bytes() for f in ("same", "other"))
    assert same == (data / "model" / "model.safetensors").read_bytes() != other


def test_the_task_extracts_the_computed_result_and_refuses_its_neighbours(data: Path) -> None:
    task = GSM8K(str(data))
    for split in SIZES:
        check_task(task, split, limit=20)
        for sample in task.samples(split) if split != "warm" else ():
            right = solved(sample.question)
            assert task.reference_answer(sample) == str(right)
            assert task.reward(sample, f" {right}").value == task.reward(sample, f"${right}.00").value == 1.0
            assert all(task.reward(sample, f"{right + off}").value == 0.0 for off in (-10, -1, 1, 10))
            assert task.reward(sample, "").value == 0.0
            assert "<<" not in task.reference_thought(sample)


def test_the_official_reader_takes_the_generated_files(data: Path, tmp_path: Path) -> None:
    official.convert({"out": str(tmp_path), "data": str(data)})
    for split in ("train", "test"):
        expected = [(row["question"], row["answer"]) for row in rows(data, split)]
        assert [(row["question"], row["answer"]) for row in rows(tmp_path, split)] == expected


# ---- the tiny model ----


def test_the_tiny_tokenizer_spells_prompts_and_solutions_without_loss(data: Path) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(data / "model")
    assert tiny_arithmetic.INSTRUCTION == FORMAT
    task = GSM8K(str(data))
    vlm = load_vlm(load_config(TrainConfig, [f"model={data / 'model'}", "task=gsm8k"]), 1.0, torch.device("cpu"))
    longest = 0
    for split in SIZES:
        for sample in task.samples(split):
            prompt = vlm.prompts.build(sample)
            solution = f"{task.reference_thought(sample)}</think>\n<answer>{task.reference_answer(sample)}</answer>"
            for text, ids in ((prompt.text, prompt.ids.tolist()), (solution, tokenizer.encode(solution))):
                assert tokenizer.decode(ids) == text
                assert tokenizer.unk_token_id not in ids
            thought, _, answer = (len(tokenizer.encode(part)) for part in solution.partition("\n<answer>"))
            assert thought <= 48 and answer <= 8, "the lengths of the configuration"
            longest = max(longest, thought)
    assert longest < 30
    numbers = [tokenizer.encode(str(number)) for number in range(100)]
    assert all(len(ids) == len(str(number)) for number, ids in enumerate(numbers)), "one token a digit"
    assert tokenizer.decode(tokenizer.encode("Zoe has 5 €.")) == "<|unknown|> has 5 <|unknown|>."


def test_the_tiny_model_is_a_gpt2_that_plain_transformers_loads(data: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(data / "model")
    assert type(model) is tf.GPT2LMHeadModel
    assert sum(p.numel() for p in model.parameters()) < 500_000


# ---- training ----


def run(data: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Metrics of a run of the tiny exercise."""
    given = {"model": data / "model", "task_args.data": data, "output_dir": folder} | options
    config = load_config(
        TrainConfig, [f"config={CONFIGS / 'tiny_arithmetic.yaml'}", *(f"{k}={v}" for k, v in given.items())]
    )
    train(config, Processes())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The samples of each group of the rollouts that were kept."""
    for path in sorted((folder / "rollouts").iterdir()):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in pq.read_table(path).to_pylist():
            groups.setdefault(row["sample_id"], []).append(row)
        yield from groups.values()


@pytest.fixture(scope="module")
def warm(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after a few supervised steps: enough to answer in the format with numbers, mostly wrong ones."""
    folder = tmp_path_factory.mktemp("runs") / "warm"
    given = {"task": "gsm8k", "task_args.data": data, "model": data / "model", "output_dir": folder} | {
        **{"train_split": "warm", "eval_split": "", "max_thought_length": 30},
        **{"max_steps": 30, "batch_size": 16, "learning_rate": 3e-3},
    }
    config = load_config(sft.SftConfig, [f"{key}={value}" for key, value in given.items()])
    sft.train(config, Processes())
    return folder


@pytest.mark.parametrize("advantage", ["grpo", "reinforce"])
def test_two_steps_of_the_exercise_give_each_sample_its_classical_advantage(
    data: Path, warm: Path, tmp_path: Path, advantage: str
) -> None:
    sizes = {"max_steps": 2, "max_thought_length": 30, "eval_steps": 2, "eval_samples": 1, "rollout_steps": 1}
    metrics = run(data, tmp_path / "run", **{"model": warm, "advantage": advantage, **sizes})
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all(0 <= metrics[step]["eval/accuracy"] <= 1 for step in (0, 2))
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-6) and metrics[2]["kl"] > 0
    groups = list(rollouts(tmp_path / "run"))
    assert len(groups) == 8 and all(len(group) == 8 for group in groups)
    for group in groups:
        rewards = [row["reward"] for row in group]
        assert set(rewards) <= {0.0, 1.0}
        expected = rewards
        if advantage == "grpo":
            expected = [(r - fmean(rewards)) / max(pstdev(rewards), 1e-8) for r in rewards]
        assert [row["answer_advantage"] for row in group] == pytest.approx(expected, abs=1e-5)
    assert any(len({row["reward"] for row in group}) == 2 for group in groups), "nothing was compared"


def test_evaluation_of_a_trained_model_counts_what_its_predictions_say(data: Path, warm: Path, tmp_path: Path) -> None:
    evaluate.main(
        [
            *("task=gsm8k", f"task_args.data={data}", f"model={warm}", "split=test", f"output_dir={tmp_path}"),
            *("max_thought_length=30", "max_answer_length=5", "bootstrap_samples=0"),
        ]
    )
    answers = {row["id"]: row["answer"] for row in rows(tmp_path, "predictions")}
    assert len(answers) == SIZES["test"]
    right = [answers[row["id"]].strip() == str(solved(row["question"])) for row in rows(data, "test")]
    assert json.loads((tmp_path / "metrics.json").read_text())["accuracy"] == pytest.approx(fmean(right))


# ---- the configuration for the real GPT-2 ----


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps by the real configuration with a random tiny GPT-2, short samples and a reward by their look."""
    folder, data = tmp_path_factory.mktemp("runs") / "gpt2", tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        sums = [{"id": f"{split}-{i}", **make_sum(split, i)} for i in range(8)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    sizes = {"max_thought_length": 6, "max_answer_length": 4, "max_steps": 10, "eval_samples": 1, "save_steps": 10}
    given = sizes | {"model": families.cached_folder("gpt2"), "task_args.data": data, "output_dir": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GSM8K, "reward", lambda *of: Reward(float(len(of[2]) % 2), {"accuracy": float(len(of[2]) % 2)}))
        arguments = [f"config={CONFIGS / 'gsm8k_gpt2.yaml'}", *(f"{key}={value}" for key, value in given.items())]
        train(load_config(TrainConfig, arguments), Processes())
    return folder


def test_the_gpt2_configuration_trains_all_weights_and_fits_the_context() -> None:
    config = load_config(TrainConfig, [f"config={CONFIGS / 'gsm8k_gpt2.yaml'}"])
    assert (config.model, config.lora_r) == ("openai-community/gpt2", 0)
    published = tf.GPT2Config()  # whose defaults are those of this model
    with torch.device("meta"):
        model = tf.GPT2LMHeadModel(published)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 124_439_808
    lengths = config.max_prompt_length or 0, config.max_thought_length, config.max_answer_length
    assert 0 < sum(lengths) + 32 < published.n_positions == 1024
    whole = sum(lengths[:1]) + 8 * sum(lengths[1:]) + 8 * 32
    assert whole <= config.max_tokens_per_row, "a group of full length fits a row"


def test_the_gpt2_configuration_samples_and_compares_groups_of_eight(gpt2_run: Path) -> None:
    groups = list(rollouts(gpt2_run))
    assert len(list((gpt2_run / "rollouts").iterdir())) == 1, "of every tenth step"
    assert len(groups) == 4 and all(len(group) == 8 for group in groups)
    for group in groups:
        rewards = [row["reward"] for row in group]
        expected = [(r - fmean(rewards)) / max(pstdev(rewards), 1e-8) for r in rewards]
        assert [row["answer_advantage"] for row in group] == pytest.approx(expected, abs=1e-5)


def test_the_gpt2_configuration_measures_greedy_accuracy_every_ten_steps(gpt2_run: Path) -> None:
    metrics = [json.loads(line) for line in (gpt2_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [0, 10]
    steps = metrics[1:]
    assert all(row["learning_rate"] == 1e-5 and math.isfinite(row["grad_norm"]) for row in steps)
    assert all(row["clip_ratio/low_mean"] == row["clip_ratio/high_mean"] == 0 for row in steps), "always on policy"
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[-1]["kl"] > 1e-9, "towards the frozen start"
    assert (gpt2_run / "checkpoint-10" / "optimizer.safetensors").is_file()


def test_the_gpt2_configuration_leaves_a_model_for_plain_transformers(gpt2_run: Path) -> None:
    start, trained = families.load_model("gpt2"), tf.AutoModelForCausalLM.from_pretrained(gpt2_run)
    tokenizer = tf.AutoTokenizer.from_pretrained(gpt2_run)
    assert tokenizer.encode("the red box") == families.load_processor("gpt2").encode("the red box")
    moved = [float((a - b).detach().abs().max()) for a, b in zip(start.parameters(), trained.parameters(), strict=True)]
    assert min(moved) > 0 and max(moved) < 10 * 1.1e-5, "at most the learning rate a step"
