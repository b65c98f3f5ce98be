"""Metrics on a split: greedy answers of the same engine, or a file of predictions.

accelerate launch -m vlm_grpo.evaluate task=refcoco split=testA model=PATH
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from vlm_grpo.checkpoint import write_whole
from vlm_grpo.config import load_config, resolved_yaml
from vlm_grpo.data import DataConfig, PromptReader, TaskConfig, skip_counts, split_samples, task_of
from vlm_grpo.engine import Engine, SamplingConfig, check_sampling_options, greedy
from vlm_grpo.errors import UserError
from vlm_grpo.judge import Judge
from vlm_grpo.load import ModelConfig, load_vlm
from vlm_grpo.metrics import table
from vlm_grpo.processes import Processes, start_processes
from vlm_grpo.rollout import RolloutTree
from vlm_grpo.scorer import answer_text
from vlm_grpo.task import Reward, Sample, TaskAdapter, describe, task_name
from vlm_grpo.vlm import VLM

BATCH = 32  # prompts whose answers grow at the same time


@dataclass
class EvaluateConfig(SamplingConfig, DataConfig, ModelConfig, TaskConfig):
    """Evaluation on a split."""

    # Split to evaluate
    split: str = "val"
    # Folder for metrics.json and predictions.jsonl; none: evaluations/TASK-SPLIT
    output_dir: str | None = None
    # Score this file of {"id", "answer"} lines (answers in original-image coordinates) instead of running a model
    predictions: str | None = None


@dataclass(frozen=True)
class Prediction:
    """One answer of an evaluation. `answer` is in original-image coordinates, `model_answer` as the model wrote it."""

    id: str
    answer: str
    reward: float | None
    parts: Mapping[str, float]
    model_answer: str = ""
    thought: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a split and the predictions behind them, in the order of the samples."""

    metrics: dict[str, float]
    predictions: list[Prediction]


def evaluate(
    vlm: VLM,
    adapter: TaskAdapter,
    samples: Sequence[Sample],
    reader: PromptReader,
    config: SamplingConfig,
    processes: Processes,
    on_batch: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Greedy answers to all samples, shared among the processes; metrics over every sample that could be read.

    The result is the same on every rank and for every number of processes.
    """
    engine = Engine(vlm, replace(config, num_thoughts=1, num_answers=1))
    judge = Judge(adapter)
    own: list[tuple[int, Prediction]] = []
    indices = list(range(processes.rank, len(samples), processes.count))
    for start in range(0, len(indices), BATCH):
        batch = indices[start : start + BATCH]
        places = {samples[i].id: i for i in batch}
        prompts = reader.read([samples[i] for i in batch])
        with torch.no_grad():
            features = vlm.encode(prompts)
            trees = engine.rollout(prompts, features, greedy)
        own.extend((places[t.prompt.sample.id], _prediction(vlm, judge, t)) for t in trees)
        on_batch(len(batch))
    ordered = [prediction for _, prediction in sorted(processes.gather(own), key=lambda pair: pair[0])]
    return summarise(adapter, samples, ordered)


def _prediction(vlm: VLM, judge: Judge, tree: RolloutTree) -> Prediction:
    thought = tree.thoughts[0]
    text = answer_text(vlm, judge.adapter, tree.prompt, thought.answers[0])
    reward = judge.score(tree.prompt.sample, text)
    value, parts = (None, {}) if reward is None else (reward.value, dict(reward.parts))
    return Prediction(tree.prompt.sample.id, text, value, parts, thought.answers[0].text, thought.text)


def summarise(adapter: TaskAdapter, samples: Sequence[Sample], predictions: Sequence[Prediction]) -> Evaluation:
    """The task's metrics over the predictions that have a reward; the others, if any, are counted beside them."""
    rewards = {p.id: Reward(p.reward, p.parts) for p in predictions if p.reward is not None}
    answers = {p.id: p.answer for p in predictions}
    scored = [sample for sample in samples if sample.id in rewards]
    metrics: dict[str, float] = {}
    try:
        if scored:
            metrics = adapter.metrics(scored, [answers[s.id] for s in scored], [rewards[s.id] for s in scored])
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(f"task {task_name(adapter)}: metrics() raised {describe(error)}") from error
    metrics = {**metrics, "num_samples": float(len(scored))}
    if len(scored) < len(predictions):
        metrics["num_without_reward"] = float(len(predictions) - len(scored))
    return Evaluation(metrics, list(predictions))


def score_predictions(adapter: TaskAdapter, samples: Sequence[Sample], path: Path) -> Evaluation:
    """Metrics of a file of predictions; a sample without a line counts as an empty answer.

    Raises: UserError, naming file and line, for lines that are no prediction, ids twice and ids that are not in the
    split.
    """
    answers: dict[str, str] = {}
    known = {sample.id for sample in samples}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"predictions={path}: it cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, answer = row["id"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'predictions={path}, line {number}: not of the form {{"id": …, "answer": …}}') from error
        where = f"predictions={path}, line {number}"
        if not isinstance(answer, str):
            raise UserError(f"{where}: the answer of id {key!r} is {answer!r}, not text")
        if not isinstance(key, str) or key not in known:
            raise UserError(f"{where}: the id {key!r} is not in the split")
        if key in answers:
            raise UserError(f"{where}: the id {key!r} is twice in the file")
        answers[key] = answer
    judge = Judge(adapter)
    predictions = []
    for sample in samples:
        text = answers.get(sample.id, "")
        reward = judge.score(sample, text)
        value, parts = (None, {}) if reward is None else (reward.value, dict(reward.parts))
        predictions.append(Prediction(sample.id, text, value, parts))
    evaluation = summarise(adapter, samples, predictions)
    return Evaluation({**evaluation.metrics, "num_missing": float(len(known) - len(answers))}, predictions)


def main(argv: Sequence[str]) -> None:
    """Evaluate as the options say; files and the printed table are the main process's."""
    config = load_config(EvaluateConfig, argv)
    check_sampling_options(config)
    processes = start_processes()
    adapter = task_of(config, demo=config.model == "tiny" and config.predictions is None)
    samples = split_samples(adapter, config.split, config.max_samples)
    notes = {"task": config.task, "split": config.split, "metric": adapter.metric_note}
    if config.predictions is not None:
        evaluation = score_predictions(adapter, samples, Path(config.predictions))
    else:
        vlm = load_vlm(config, config.temperature, processes.device)
        reader = PromptReader(vlm, adapter, config, prompt_limit(vlm, config, config.max_prompt_length))
        notes |= run_notes(vlm, PromptReader(vlm, adapter, config, reader.limit), samples)
        say = _counter(len(samples)) if processes.is_main else (lambda count: None)
        evaluation = evaluate(vlm, adapter, samples, reader, config, processes, say)
        notes |= {name: f"{count:.0f}" for name, count in skip_counts(reader.skipped, processes).items()}
        left_out = processes.gather(reader.skipped.take_messages())
        for message in left_out if processes.is_main else ():
            print(f"skipped: {message}", file=sys.stderr)
    if processes.is_main:
        folder = Path(config.output_dir or f"evaluations/{config.task.replace(':', '-')}-{config.split}")
        write_evaluation(folder, evaluation, notes, resolved_yaml(config))
        print("\n".join(f"{name}: {value}" for name, value in notes.items()))
        print(table(evaluation.metrics))
        print(f"written: {folder}/metrics.json and predictions.jsonl")


def prompt_limit(vlm: VLM, config: SamplingConfig, asked: int | None) -> int:
    """Most tokens of a prompt: as asked, and no more than the model's context leaves for thought and answer."""
    context = getattr(vlm.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    room = (
        context - config.max_thought_length - config.max_answer_length - 32
    )  # 32: the bridge between them, generously
    if room <= 0 or (asked is not None and asked <= 0):
        raise UserError(
            f"max_prompt_length: no token is left for a prompt: the context has {context}, max_thought_length is "
            f"{config.max_thought_length}, max_answer_length {config.max_answer_length}, max_prompt_length {asked}"
        )
    return room if asked is None else min(room, asked)


def run_notes(vlm: VLM, reader: PromptReader, samples: Sequence[Sample]) -> dict[str, str]:
    """What moves a benchmark number by points: the first prompt that can be read, coordinate space, pixel limits."""
    prompt = next((prompt for sample in samples for prompt in reader.read([sample])), None)
    size = getattr(getattr(vlm.processor, "image_processor", None), "size", None)
    return {
        "prompt": "none could be read" if prompt is None else repr(prompt.text),
        "coordinates": str(vlm.family.coordinates),
        "image size": "as the model's files say" if size is None else str(dict(size)),
        "decoding": "greedy, one thought, one answer",
    }


def write_evaluation(folder: Path, evaluation: Evaluation, notes: Mapping[str, str], config_yaml: str) -> None:
    """Write metrics.json, predictions.jsonl and the options, each whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(asdict(p), ensure_ascii=True) + "\n" for p in evaluation.predictions)
        write_whole(folder / "predictions.jsonl", lines.encode())
        write_whole(
            folder / "metrics.json",
            (json.dumps({**evaluation.metrics, "notes": dict(notes)}, indent=1) + "\n").encode(),
        )
        write_whole(folder / "evaluation.yaml", config_yaml.encode())
    except OSError as error:
        raise UserError(f"output_dir={folder}: it cannot be written: {error}") from error


def _counter(total: int) -> Callable[[int], None]:
    done = 0

    def say(count: int) -> None:
        nonlocal done
        done += count
        print(f"evaluated about {min(total, done)} of {total}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    from vlm_grpo.program import run

    run(main)
