"""Several tasks in one run: whose turn it is, what each of them draws, and whose reward and metrics an answer has."""

import json
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support import families
from support.forks import KILLED, Forks, forks

from vlm_grpo.algorithm.advantage import group_advantages
from vlm_grpo.algorithm.trainer import StepConfig, Trainer
from vlm_grpo.common.config import load_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.mixture import Mixture, MixtureConfig, splits_of
from vlm_grpo.data.reader import DataConfig, PromptReader, epoch_indices
from vlm_grpo.data.tasks import TaskConfig, task_names, tasks_of
from vlm_grpo.model.vlm import VLM
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter

CONFIG = Path(__file__).parents[2] / "configs" / "mixture_tiny.yaml"


def texts(name: str, count: int) -> list[Sample]:
    return [Sample(f"{name}-{i}", [], "Where is the red box?", None) for i in range(count)]


def drawn(mixture: Mixture, number: int, per_step: int) -> list[tuple[str, str]]:
    return [(sample.task, sample.id) for sample in mixture.step(number, per_step)]


# ---- whose turn it is ----

WEIGHTS = st.lists(st.decimals("0.01", "50", places=2).map(float), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.integers(1, 17), st.integers(1, 12), st.integers(0, 3))
def test_every_task_has_its_share_of_the_first_steps_for_any_number_of_them(weights, per_step, steps, seed) -> None:
    mixture = Mixture({f"t{i}": texts(f"t{i}", 3 + i) for i in range(len(weights))}, weights, seed)
    total = sum(Fraction(str(weight)) for weight in weights)
    counts: Counter[str] = Counter()
    for number in range(1, steps + 1):
        counts.update(task for task, _ in drawn(mixture, number, per_step))
        assert counts.total() == number * per_step
        for i, weight in enumerate(weights):
            share = number * per_step * Fraction(str(weight)) / total
            assert abs(counts[f"t{i}"] - share) < 1


@pytest.mark.parametrize("weights", [[2, 1], [1, 1, 1], [0.7, 0.2, 0.1], [1e-3, 1]])
def test_a_step_is_a_function_of_step_and_seed_alone(weights: list[float]) -> None:
    def fresh(seed: int = 5) -> Mixture:
        return Mixture({f"t{i}": texts(f"t{i}", 7 + i) for i in range(len(weights))}, weights, seed)

    mixture = fresh()
    steps = [drawn(mixture, number, 6) for number in range(1, 30)]
    for number in (29, 1, 17, 2):  # in any order, and as in a run that begins there
        assert drawn(mixture, number, 6) == drawn(fresh(), number, 6) == steps[number - 1]
    assert [drawn(fresh(6), number, 6) for number in range(1, 30)] != steps


def test_each_task_goes_through_its_own_epochs() -> None:
    sizes = {"a": 7, "b": 4, "c": 1}
    mixture = Mixture({name: texts(name, size) for name, size in sizes.items()}, [3, 2, 1], seed=1)
    seen: dict[str, list[str]] = {name: [] for name in sizes}
    for number in range(1, 41):
        of_step: dict[str, list[str]] = {name: [] for name in sizes}
        for task, sample_id in drawn(mixture, number, 6):
            of_step[task].append(sample_id)
        assert {name: len(ids) for name, ids in of_step.items()} == {"a": 3, "b": 2, "c": 1}
        for name, ids in of_step.items():
            seen[name] += sorted(ids)  # a step is shuffled
    whole_epochs = seen["b"][: len(seen["b"]) // 4 * 4]
    assert all(len(set(whole_epochs[i : i + 4])) == 4 for i in range(0, len(whole_epochs), 4)), (
        "2 draws a step, 4 samples"
    )
    counts = Counter(seen["a"])
    assert max(counts.values()) - min(counts.values()) <= 1 and len(counts) == 7
    assert len({tuple(whole_epochs[i : i + 4]) for i in range(0, len(whole_epochs), 4)}) > 1, "shuffled anew"


def test_what_a_task_draws_does_not_depend_on_its_neighbours() -> None:
    def of_a(others: Sequence[str], number: int) -> set[str]:
        mixture = Mixture({name: texts(name, 9) for name in (*others, "a")}, None, seed=2)
        return {i for task, i in drawn(mixture, number, 4 * (len(others) + 1)) if task == "a"}

    for number in (1, 2, 5):
        assert of_a(["b"], number) == of_a(["c", "d"], number)


def test_a_single_task_is_drawn_as_ever() -> None:
    samples = texts("only", 7)
    mixture = Mixture({"only": samples}, None, seed=3)
    for number in (1, 2, 9):
        expected = [samples[i].id for i in epoch_indices(7, (number - 1) * 5, 5, 3)]
        assert drawn(mixture, number, 5) == [("only", i) for i in expected]


def test_processes_and_minibatches_get_their_share_of_each_task() -> None:
    """As they would not if tasks took turns within a step."""
    mixture = Mixture({"a": texts("a", 50), "b": texts("b", 50)}, [1, 1], seed=0)
    tasks = [[task for task, _ in drawn(mixture, number, 8)] for number in range(1, 101)]
    of_rank = [sum(task == "a" for step in tasks for task in step[rank::2]) for rank in range(2)]
    of_first_half = sum(task == "a" for step in tasks for task in step[:4])
    assert sum(of_rank) == 400
    assert all(160 < count < 240 for count in (*of_rank, of_first_half))


def test_samples_are_made_once_when_asked_for_and_marked_with_their_task() -> None:
    made: list[int] = []

    def make(index: int) -> Sample:
        made.append(index)
        return original[index]

    original = texts("s", 20)
    mixture = Mixture({"a": LazySamples([s.id for s in original], make), "b": texts("b", 20)}, None, seed=0)
    step = mixture.step(1, 10)
    assert len(step) == 10 and not made
    first = [step[place] for place in range(0, 10, 2)]
    assert [step[place] for place in range(0, 10, 2)] == first
    assert len(made) == sum(sample.task == "a" for sample in first)
    assert all(a is b for a, b in zip(first, step[::2], strict=True))
    assert all(sample.task == "" for sample in original), "the task's own samples are left alone"
    with pytest.raises(IndexError):
        step[10]


def test_a_sample_that_cannot_be_made_is_named_when_it_is_asked_for() -> None:
    def make(index: int) -> Sample:
        raise KeyError("box")

    step = Mixture({"a": LazySamples(["x"], make), "b": texts("b", 5)}, None, seed=0).step(1, 2)
    assert len(step.made(range(2))) < 2
    with pytest.raises(UserError, match=r"^task \w+: sample 'x' cannot be made: KeyError: 'box'"):
        list(step)


# ---- options ----


@pytest.mark.parametrize("given", ["[2]", "[1,2,3]", "[1,0]", "[1,-1]", "[1,.inf]", "[1,.nan]"])
def test_weights_that_are_no_shares_are_refused(given: str) -> None:
    weights = load_config(MixtureConfig, [f"task_weights={given}"]).task_weights
    with pytest.raises(UserError, match=r"task_weights=.*each of the tasks a, b"):
        Mixture({"a": texts("a", 1), "b": texts("b", 1)}, weights, 0)


def test_tasks_are_known_by_their_names() -> None:
    assert task_names(TaskConfig("refcoco")) == {"refcoco": "refcoco"}
    both = load_config(TaskConfig, ["task=[refcoco,plus=refcoco]", "task_args.plus.protocol=vlm-r1"])
    assert task_names(both) == {"refcoco": "refcoco", "plus": "refcoco"}
    first, second = tasks_of(both, demo=True).values()
    assert "IoU >= 0.5" in first.metric_note and "IoU > 0.5" in second.metric_note
    assert task_names(TaskConfig(["my_lab.tasks:Knots", "refcoco"])) == {
        "Knots": "my_lab.tasks:Knots",
        "refcoco": "refcoco",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["task=[]"], r"task: name one of .*refcoco"),
        # A list of one is one: its arguments are flat
        (["task=[refcoco,]", "task_args.dat=x"], r"unknown argument task_args\.dat\. Did you mean 'data'"),
        (["task=[refcoco,refcoco]"], r"two tasks are called 'refcoco'.*first=refcoco"),
        (["task=[refcoco,a b=refcoco]"], r"'a b' is no name of a task"),
        (["task=[refcoco,b=refcoc]"], r"unknown task 'refcoc'. Did you mean 'refcoco'"),
        (["task=[refcoco,b=refcoco]", "task_args.data=scenes"], r"task_args.data: which of the tasks refcoco, b"),
        (["task=[refcoco,b=refcoco]", "task_args.refcocoo.data=scenes"], r"Did you mean task_args.refcoco\?"),
        (["task=[refcoco,b=refcoco]", "task_args.b=scenes"], r"task_args.b is 'scenes'; it must hold arguments"),
        (["task=[refcoco,b=refcoco]", "task_args.b.limt=3"], r"task_args.b.limt.* Did you mean 'limit'"),
    ],
)
def test_options_of_several_tasks_that_mean_nothing_are_errors(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks_of(load_config(TaskConfig, options), demo=True)


def test_splits_are_those_of_all_tasks_or_of_each() -> None:
    assert splits_of("eval_split", "val", ["a", "b"]) == {"a": "val", "b": "val"}
    assert splits_of("eval_split", ["val", ""], ["a", "b"]) == {"a": "val", "b": ""}
    with pytest.raises(UserError, match=r"eval_split=\['val'\].*each of the tasks a, b"):
        splits_of("eval_split", ["val"], ["a", "b"])


# ---- a step over several tasks ----


class Boxes(TaskAdapter):
    """Rewards from 10 to 12, by the answer in original pixels; an odd one has none."""

    coordinates = True

    def samples(self, split: str) -> Sequence[Sample]:
        return [
            Sample(f"box-{i}", [Image.new("RGB", (100 + i, 50))], "Where is [10, 10, 20, 20]?", i) for i in range(5)
        ]

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        value = zlib.crc32(answer.encode("utf-8", "replace")) % 5
        return Reward(10 + value / 2, {"iou": value / 4}) if value < 4 else None

    def reference_answer(self, sample: Sample) -> str:
        return "[1, 2, 3, 4]"


class Words(TaskAdapter):
    """Rewards from 0 to 1."""

    def samples(self, split: str) -> Sequence[Sample]:
        return texts("word", 5)

    def reward(self, sample: Sample, answer: str) -> Reward:
        value = zlib.crc32(answer.encode("utf-8", "replace")) % 3
        return Reward(value / 2, {"exact": float(value == 2), "length": float(len(answer))})

    def reference_answer(self, sample: Sample) -> str:
        return "box"


STEP = StepConfig(num_thoughts=3, num_answers=2, max_thought_length=5, max_answer_length=4, prompts_per_step=6)


@pytest.fixture(scope="module")
def mixed_step() -> tuple[Trainer, Any]:
    vlm = VLM(families.load_model("qwen2_5_vl", torch.float32), families.load_processor("qwen2_5_vl"))
    tasks: dict[str, TaskAdapter] = {"boxes": Boxes(), "words": Words()}
    trainer = Trainer(vlm, tasks, PromptReader(vlm.prompts, tasks, DataConfig(), 10_000), STEP, Processes())
    mixture = Mixture({name: task.samples("train") for name, task in tasks.items()}, [2, 1], seed=0)
    return trainer, trainer.step(1, mixture.step(1, 6))


def test_each_answer_is_scored_by_its_own_task(mixed_step) -> None:
    _, result = mixed_step
    assert Counter(row.task for row in result.rows) == {"boxes": 4 * 6, "words": 2 * 6}
    for row in result.rows:
        assert row.sample_id.startswith("box-" if row.task == "boxes" else "word-")
        adapter: TaskAdapter = Boxes() if row.task == "boxes" else Words()
        expected = adapter.reward(Sample("", [], "", None), row.answer)
        assert row.reward == (None if expected is None else expected.value)
        assert set(row.parts) - {"format"} == ({"iou"} if row.task == "boxes" else {"exact", "length"}) or not expected
        # The question's box, and how boxes are to be written, are in the model's coordinates for the one task alone
        assert ("[10, 10, 20, 20]" not in row.prompt) and ("Coordinates are" in row.prompt) == (row.task == "boxes")


def test_advantages_stay_within_a_prompt(mixed_step) -> None:
    """Rewards of the one task are twenty times those of the other; no advantage knows of it."""
    _, result = mixed_step
    for sample_id in {row.sample_id for row in result.rows}:
        rows = [row for row in result.rows if row.sample_id == sample_id]
        rewards = torch.tensor([math.nan if row.reward is None else row.reward for row in rows]).view(3, 2)
        alone = group_advantages(rewards, STEP)
        assert [row.answer_advantage for row in rows] == alone.answers.flatten().tolist()
        assert [row.thought_advantage for row in rows] == [float(x) for x in alone.thoughts for _ in range(2)]


def test_metrics_of_a_step_are_those_of_each_task_too(mixed_step) -> None:
    _, result = mixed_step
    metrics = result.metrics
    for task in ("boxes", "words"):
        rows = [row for row in result.rows if row.task == task]
        rewards = [row.reward for row in rows if row.reward is not None]
        assert metrics[f"reward/{task}"] == pytest.approx(statistics.mean(rewards))
        assert metrics[f"answers_without_reward/{task}"] == sum(row.reward is None for row in rows)
        assert metrics[f"num_prompts/{task}"] == len(rows) / 6
        for part in ("iou", "exact", "length", "format"):
            values = [row.parts[part] for row in rows if part in row.parts]
            assert (f"rewards/{task}/{part}/mean" in metrics) == bool(values)
            if values:
                assert metrics[f"rewards/{task}/{part}/mean"] == pytest.approx(statistics.mean(values))
                assert metrics[f"rewards/{task}/{part}/std"] == pytest.approx(statistics.pstdev(values))
    every = [row.reward for row in result.rows if row.reward is not None]
    assert metrics["reward"] == pytest.approx(statistics.mean(every))
    assert not [name for name in metrics if name.startswith("rewards/") and name.count("/") == 2]


def test_a_task_without_a_prompt_in_the_step_has_no_numbers(mixed_step) -> None:
    trainer, _ = mixed_step
    samples = [replace(sample, task="words") for sample in Words().samples("train")[:2]]
    metrics = trainer.step(2, samples).metrics
    assert metrics["num_prompts/boxes"] == 0 and math.isnan(metrics["reward/boxes"])
    assert metrics["reward/words"] == metrics["reward"]


# ---- whole runs ----

SMALL = {
    **{"config": CONFIG, "max_steps": 3, "prompts_per_step": 6, "eval_samples": 4, "eval_steps": 2, "save_steps": 1},
    **{"num_thoughts": 2, "num_answers": 2, "task_args.refcoco.limit": 9, "task_args.vqav2.limit": 5},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("runs")) as server:
        yield server


def run(server: Forks, name: str, processes: int = 1, **changes: Any) -> Path:
    """A run of the shipped configuration with fewer and smaller steps; its folder."""
    options = SMALL | {"output_dir": name} | changes
    codes = server.run("train", name, options, processes, changes.pop("kill", None))
    assert codes == [0] * processes, server.log(name)
    return server.folder / name


@pytest.fixture(scope="module")
def whole(server: Forks) -> Path:
    return run(server, "whole")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "time" not in k} for line in lines]


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rollouts" / f"step-{step:06}.parquet").to_pylist()


def test_the_shipped_mixture_records_each_task(whole: Path) -> None:
    first, *steps = rows_of(whole)
    assert first["step"] == 0 and {"eval/refcoco/acc@0.5", "eval/vqav2/accuracy"} <= first.keys()
    evaluated = [name for name in first if name.startswith("eval/")]
    assert [next(n for n in evaluated if task in n) for task in ("refcoco", "vqav2")] == [
        "eval/refcoco/acc@0.5",
        "eval/vqav2/accuracy",
    ], "headlines come first"
    for row in steps:
        assert (row["num_prompts/refcoco"], row["num_prompts/vqav2"]) == (4, 2)
        assert {"rewards/refcoco/iou/mean", "rewards/vqav2/accuracy/mean", "rewards/vqav2/format/mean"} <= row.keys()
        assert "rewards/iou/mean" not in row
    for row in rollouts(whole, 1):
        task_part = "rewards/iou" if row["task"] == "refcoco" else "rewards/accuracy"
        assert row["reward"] == pytest.approx(row[task_part] + 0.1 * row["rewards/format"], abs=1e-6)
    assert {row["task"] for row in rollouts(whole, 1)} == {"refcoco", "vqav2"}


def test_the_table_of_a_mixture_has_a_group_for_each_task(server: Forks, whole: Path) -> None:
    log = server.log("whole")
    table = log[log.index("metric  ") :].splitlines()
    heads = [number for number, line in enumerate(table) if line.endswith("val, 4 samples, greedy")]
    assert [table[number].partition(":")[0] for number in heads] == ["refcoco", "vqav2"]
    assert table[heads[0] + 1].split()[0] == "acc@0.5" and table[heads[1] + 1].split()[0] == "accuracy"
    assert "step 2 · refcoco acc@0.5" in log and "step 2 · vqav2 accuracy" in log
    before, after = rows_of(whole)[0], rows_of(whole)[-1]
    cells = table[heads[0] + 1].split()[1:3]
    assert cells == [f"{row['eval/refcoco/acc@0.5']:.4f}" for row in (before, after)]


def test_a_killed_mixture_goes_on_to_the_same_weights(server: Forks, whole: Path) -> None:
    options = SMALL | {"output_dir": "killed"}
    codes = server.run("train", "killed", options, 1, ("vlm_grpo.train:MetricsWriter.write", 3))
    assert codes == [KILLED] and (server.folder / "killed" / "checkpoint-1").exists(), server.log("killed")
    killed = run(server, "killed", resume_from_checkpoint="true", dataloader_num_workers=0)  # it computes nothing else
    assert rows_of(killed) == rows_of(whole)
    for name in ("model.safetensors", "checkpoint-3/optimizer.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    for step in (1, 2, 3):
        assert rollouts(killed, step) == rollouts(whole, step)


def test_two_processes_see_the_same_prompts_of_each_task(server: Forks, whole: Path) -> None:
    two = run(server, "two", processes=2, eval_steps=0)
    for step in (1, 2, 3):
        seen = [sorted((r["task"], r["sample_id"]) for r in rollouts(folder, step)) for folder in (two, whole)]
        assert seen[0] == seen[1]
    first, expected = rows_of(two)[0], rows_of(whole)[0]
    assert {k: v for k, v in first.items() if k.startswith("eval/")} == pytest.approx(
        {k: v for k, v in expected.items() if k.startswith("eval/")}
    )
    assert rows_of(two)[1]["num_prompts/refcoco"] == 4


def test_a_warm_start_takes_a_mixture_too(server: Forks) -> None:
    options = {
        **{"task": "[refcoco,vqav2]", "task_weights": "[1,2]", "max_steps": 2, "batch_size": 6, "eval_samples": 3},
        **{"eval_split": "[val,test]", "output_dir": "warm"},
    }
    assert server.run("sft", "warm", options) == [0], server.log("warm")
    rows = rows_of(server.folder / "warm")
    assert rows[-1].keys() >= {"eval/refcoco/acc@0.5", "eval/vqav2/accuracy"}
    assert "vqav2 test, 3 samples, greedy:" in server.log("warm")


def test_a_list_of_one_task_is_that_task(server: Forks) -> None:
    few = {
        "max_steps": 1,
        "prompts_per_step": 2,
        "num_thoughts": 2,
        "num_answers": 2,
        "eval_split": "",
        "save_steps": 0,
    }
    for name, task in (("bare", "refcoco"), ("listed", "[refcoco]")):
        assert server.run("train", name, few | {"task": task, "output_dir": name}) == [0], server.log(name)
    bare, listed = server.folder / "bare", server.folder / "listed"
    assert rows_of(bare) == rows_of(listed) and rollouts(bare, 1) == rollouts(listed, 1)
    assert (bare / "model.safetensors").read_bytes() == (listed / "model.safetensors").read_bytes()
    assert "rewards/iou/mean" in rows_of(bare)[0] and "reward/refcoco" not in rows_of(bare)[0]
