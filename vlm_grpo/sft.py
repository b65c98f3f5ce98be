"""Supervised warm start on a task's reference answers, and its reference thoughts where it has them.

    accelerate launch -m vlm_grpo.sft task=refcoco output_dir=warm

A reference is a tree with one thought and one answer, so that model, prompt, bridge and packing are those of the main
job.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from vlm_grpo.algorithm.check import check_model, check_schedule
from vlm_grpo.algorithm.optim import OptimConfig, Optimizer, learning_rate
from vlm_grpo.common.config import load_config, refuse_idle, resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes, start_processes
from vlm_grpo.data.mixture import ComingSteps, Mixture, MixtureConfig, check_mixture, samples_of, splits_of
from vlm_grpo.data.reader import DataConfig, PromptReader, check_used, skip_counts
from vlm_grpo.data.tasks import TaskConfig, bind_tasks, tasks_of, tasks_title
from vlm_grpo.evaluation.answering import evaluate, prompt_limit
from vlm_grpo.model.coordinates import answer_in_model
from vlm_grpo.model.features import join_features
from vlm_grpo.model.load import ModelConfig, load_vlm, parameter_summary, save_model_files
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.sampling import DRAW_OPTIONS, SEEDS, SamplingConfig
from vlm_grpo.runs.changes import table
from vlm_grpo.runs.checkpoint import save_model
from vlm_grpo.runs.folder import begin_run, check_unused, held
from vlm_grpo.runs.progress import Progress
from vlm_grpo.runs.writer import MetricsWriter, eval_metrics
from vlm_grpo.task.interface import TaskAdapter, describe, task_name
from vlm_grpo.tree.pack import Segment, fill_rows, pack, packed_length
from vlm_grpo.tree.tags import response_ids
from vlm_grpo.tree.types import Prompt


@dataclass
class SftConfig(SamplingConfig, OptimConfig, MixtureConfig, DataConfig, ModelConfig, TaskConfig):
    """A supervised run."""

    ROOM = "program"
    FIRST = ("task", "task_args", "model", "output_dir", "batch_size", "max_steps", "learning_rate")

    # Seed of the order of samples
    seed: Annotated[int, SEEDS] = 0
    # Steps of the run
    max_steps: Annotated[int, Range(at_least=1)] = 100
    # Samples of one step, over all processes
    batch_size: Annotated[int, Range(at_least=1)] = 32
    # Samples are packed into rows of at most so many tokens
    max_tokens_per_row: Annotated[int, Range(at_least=1)] = 4096
    # Folder of the model and its metrics; none: runs/sft-TASK
    output_dir: str | None = None
    # Held-out split that is evaluated at the end; empty: none. Where several tasks are named: of all of them, or a list
    # in their order
    eval_split: str | list[str] = "val"
    # Use only the first so many of its samples (of each task's); none: all
    eval_samples: Annotated[int | None, Range(at_least=1)] = 256


def reference_tree(vlm: VLM, adapter: TaskAdapter, prompt: Prompt) -> list[Segment]:
    """Prompt, reference thought, reference answer: what the model should have said, token by token.

    The answer ends with its closing tag and the end-of-sequence id, so that plain generation ends there too.
    """
    where = f"task {task_name(adapter)}, sample {prompt.sample.id!r}"
    try:
        answer, thought = adapter.reference_answer(prompt.sample), adapter.reference_thought(prompt.sample)
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(f"{where}: its reference raised {describe(error, type(adapter))}") from error
    if not isinstance(answer, str) or not isinstance(thought, str):
        raise UserError(f"{where}: reference answer and thought must be text, they are {answer!r} and {thought!r}")
    texts = answer_in_model(prompt, thought), answer_in_model(prompt, answer)
    thought_ids, bridge, answer_ids = response_ids(vlm.tokenizer, *texts)
    return [
        Segment(prompt.ids, parent=-1, prompt=prompt),
        Segment(torch.tensor([*thought_ids, *bridge]), parent=0, num_scored=len(thought_ids)),
        Segment(torch.tensor(answer_ids), parent=1, num_scored=len(answer_ids)),
    ]


def sft_backward(
    vlm: VLM, trees: Sequence[Sequence[Segment]], num_tokens: int, max_tokens_per_row: int, tower_trains: bool
) -> float:
    """Add the gradient of the mean negative log-likelihood over `num_tokens` (of all processes); gives back its
    share.
    """
    prompts = [tree[0].prompt for tree in trees]
    assert all(prompt is not None for prompt in prompts), "the root of a tree carries its prompt"
    loss = 0.0
    for row in fill_rows([packed_length(tree) for tree in trees], max_tokens_per_row):
        of_row = [prompt for i in sorted(row) if (prompt := prompts[i]) is not None]
        with torch.set_grad_enabled(tower_trains):
            features = join_features(vlm.encode(of_row))
        logprobs = vlm.logprobs(pack([trees[i] for i in sorted(row)]), features)
        share = -logprobs.sum() / num_tokens
        share.backward()
        loss += float(share.detach())
    return loss


def check_sft(config: SftConfig) -> None:
    """Raise UserError for options of which no supervised run can be made. It finds the tasks, but reads no data."""
    splits = {"train_split": config.train_split, "eval_split": config.eval_split}
    check_mixture(list(bind_tasks(config, demo=config.model == "tiny")), config.task_weights, splits)
    check_model(config)
    check_schedule(config, config.max_steps)
    refuse_idle(config, DRAW_OPTIONS, "in a supervised run, which draws nothing")


def train(config: SftConfig, processes: Processes) -> None:
    """Run the supervised job that the options describe."""
    check_sft(config)
    folder = Path(config.output_dir or f"runs/sft-{tasks_title(config)}")
    yaml = resolved_yaml(config)
    tasks = tasks_of(config, demo=config.model == "tiny")
    splits = splits_of("train_split", config.train_split, list(tasks))
    mixture = Mixture(samples_of(tasks, splits, config.max_samples), config.task_weights, config.seed)
    splits = splits_of("eval_split", config.eval_split, list(tasks))
    held_out = samples_of(tasks, {n: s for n, s in splits.items() if s}, config.eval_samples, "eval_split")
    check_unused(folder, yaml)
    vlm = load_vlm(config, config.temperature, processes.device)
    limit = prompt_limit(vlm, config, config.max_prompt_length)
    optimizer = Optimizer(vlm.model, config, processes)
    processes.wait()
    with ExitStack() as stack:
        if processes.is_main:
            stack.enter_context(held(folder))
            begin_run(folder, yaml, None)
            counts = " · ".join(f"task: {name} · {len(samples)} samples" for name, samples in mixture.samples.items())
            print(f"{yaml}{counts} · {parameter_summary(vlm)}\noutput folder: {folder}")
        reader = stack.enter_context(PromptReader(vlm.prompts, tasks, config, limit))
        writer = stack.enter_context(MetricsWriter(folder)) if processes.is_main else None
        _run(config, processes, vlm, reader, optimizer, mixture, writer)
        if processes.is_main:
            save_model(folder, lambda target: save_model_files(vlm, target))
            print(f"model: {folder}")
        evaluated = {}
        for name, samples in held_out.items():
            own = stack.enter_context(PromptReader(vlm.prompts, tasks[name], config, limit))
            evaluated[name] = evaluate(vlm, tasks[name], samples, own, config, processes).metrics
            if processes.is_main:
                of_task = f"{name} " if len(tasks) > 1 else ""
                print(f"{of_task}{splits[name]}, {len(samples)} samples, greedy:\n{table(evaluated[name])}")
        if writer and evaluated:
            writer.write(config.max_steps, eval_metrics(evaluated, len(tasks)))


def _run(
    config: SftConfig,
    processes: Processes,
    vlm: VLM,
    reader: PromptReader,
    optimizer: Optimizer,
    mixture: Mixture,
    writer: MetricsWriter | None,
) -> None:
    tower_trains = vlm.tower_trains
    progress = Progress(config.max_steps, "loss") if writer else None
    coming = ComingSteps(mixture, config.batch_size, config.max_steps, reader, processes)
    for step in range(1, config.max_steps + 1):
        samples = coming.samples(step)
        prompts = reader.read([samples[place] for place in processes.share(len(samples))])
        trees = [reference_tree(vlm, reader.tasks[prompt.sample.task], prompt) for prompt in prompts]
        own = sum(s.num_scored for tree in trees for s in tree)
        num_tokens = max(1, sum(processes.gather([own])))
        share = sft_backward(vlm, trees, num_tokens, config.max_tokens_per_row, tower_trains)
        loss = sum(processes.gather([share]))
        rate = learning_rate(config, step, config.max_steps)
        norm = optimizer.step(rate, vlm.family.vision_modules)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "num_tokens": float(num_tokens)}
        metrics |= skip_counts(reader.skipped, processes)
        last = step == config.max_steps
        check_used(reader.skipped, metrics, step * config.batch_size, len(mixture), last)
        left_out = processes.gather(reader.skipped.take_messages())
        if writer and progress:
            writer.write(step, metrics)
            for message in left_out:
                progress.say(f"skipped: {message}")
            progress.update(metrics, num_tokens)
    if progress:
        progress.close()


def main(argv: Sequence[str]) -> None:
    """Warm-start as the options say."""
    config = load_config(SftConfig, argv)
    train(config, start_processes())


if __name__ == "__main__":
    from vlm_grpo.common.program import run

    run(main)
