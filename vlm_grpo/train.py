"""The main job.

    accelerate launch -m vlm_grpo.train task=refcoco

Options stand as key=value, defaults are in `TrainConfig` and its owners; `help=true` lists them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from torch import Tensor

from vlm_grpo.algorithm.check import check, check_adapter, check_model
from vlm_grpo.algorithm.diagnostics import SpikeScore
from vlm_grpo.algorithm.reference import PREFIX as REFERENCE_PREFIX
from vlm_grpo.algorithm.reference import load_reference, reference_tensors
from vlm_grpo.algorithm.trainer import StepConfig, StepResult, Trainer
from vlm_grpo.common.atomic import write_whole
from vlm_grpo.common.config import load_config, resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes, start_processes
from vlm_grpo.data.mixture import ComingSteps, Mixture, MixtureConfig, check_mixture, samples_of, splits_of
from vlm_grpo.data.reader import DataConfig, PromptReader, check_used, skip_counts
from vlm_grpo.data.tasks import TaskConfig, bind_tasks, tasks_of, tasks_title
from vlm_grpo.evaluation.answering import evaluate, prompt_limit
from vlm_grpo.model.load import (
    ModelConfig,
    attention_summary,
    load_model,
    load_vlm,
    model_path,
    parameter_summary,
    save_model_files,
)
from vlm_grpo.model.vlm import VLM
from vlm_grpo.runs.changes import Change, before_after_table, grouped_table
from vlm_grpo.runs.checkpoint import (
    keep_newest,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    save_checkpoint,
    save_model,
)
from vlm_grpo.runs.folder import begin_run, find_resume, held
from vlm_grpo.runs.progress import Progress
from vlm_grpo.runs.writer import MetricsWriter, eval_metrics, write_rollouts
from vlm_grpo.task.interface import Sample

SPARE_SEED = 0x5EED  # apart from the run's, so that spare samples are a function of step and seed too


@dataclass
class TrainConfig(StepConfig, MixtureConfig, DataConfig, ModelConfig, TaskConfig):
    """A training run."""

    ROOM = "program"
    FIRST = (
        *("task", "task_args", "model", "output_dir", "resume_from_checkpoint"),
        *("num_thoughts", "num_answers", "max_thought_length", "max_answer_length"),
        *("prompts_per_step", "max_steps", "learning_rate", "beta"),
    )

    # Folder of checkpoints, metrics and rollouts; none: runs/TASK-MODEL
    output_dir: str | None = None
    # true: go on from the newest checkpoint of output_dir; a path: from that one
    resume_from_checkpoint: bool | str = False
    # Held-out split that is evaluated before, during and after training; empty: none. Where several tasks are named: of
    # all of them, or a list in their order
    eval_split: str | list[str] = "val"
    # Use only the first so many of its samples (of each task's); none: all
    eval_samples: Annotated[int | None, Range(at_least=1)] = 256
    # Steps between evaluations; 0: only before and after
    eval_steps: Annotated[int, Range(at_least=0)] = 80
    # Steps between checkpoints; 0: none but the final model
    save_steps: Annotated[int, Range(at_least=0)] = 80
    # Keep so many of the newest checkpoints
    save_total_limit: Annotated[int, Range(at_least=1)] = 2
    # Write the rollouts of every so many steps; 0: none
    rollout_steps: Annotated[int, Range(at_least=0)] = 1


class Run:
    """One run: what is given to every step, and where its results go. Use as a context manager."""

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.folder = Path(config.output_dir or f"runs/{tasks_title(config)}-{_short(config.model)}")
        self.tasks = tasks_of(config, demo=config.model == "tiny")
        splits = splits_of("train_split", config.train_split, list(self.tasks))
        samples = samples_of(self.tasks, splits, config.max_samples)
        self.mixture = Mixture(samples, config.task_weights, config.seed)
        self.spares = Mixture(samples, config.task_weights, config.seed ^ SPARE_SEED)
        splits = splits_of("eval_split", config.eval_split, list(self.tasks))
        self.eval_splits = {name: split for name, split in splits.items() if split}
        self.held_out = samples_of(self.tasks, self.eval_splits, config.eval_samples, "eval_split")
        self.yaml = resolved_yaml(config)
        self.checkpoint = find_resume(self.folder, config.resume_from_checkpoint, self.yaml)
        self.state = load_checkpoint(self.checkpoint) if self.checkpoint else None
        self.first = self.state.step + 1 if self.state else 1
        self.vlm = load_vlm(config, config.temperature, processes.device, self.checkpoint)
        limit = prompt_limit(self.vlm, config, config.max_prompt_length)
        self.reader = PromptReader(self.vlm.prompts, self.tasks, config, limit)
        self.eval_readers = {
            name: PromptReader(self.vlm.prompts, self.tasks[name], config, limit) for name in self.held_out
        }
        if config.beta > 0:
            self._keep_reference()
        self.trainer = Trainer(self.vlm, self.tasks, self.reader, config, processes)
        self.coming = ComingSteps(self.mixture, config.prompts_per_step, config.max_steps, self.reader, processes)
        if self.state:
            tensors = {name: t for name, t in self.state.tensors.items() if not name.startswith(REFERENCE_PREFIX)}
            load_optimizer(self.trainer.optimizer.adamw, self.trainer.optimizer.named, tensors)
            if config.sync_ref_model:
                load_reference(self.vlm.reference, self.state.tensors)
            self.trainer.optimizer.skipped_steps = self.state.state["skipped_steps"]
            self.trainer.spikes = SpikeScore(**self.state.state.get("spikes", {}))
            if processes.is_main:  # saved as sums over the processes
                self.reader.skipped.bad, self.reader.skipped.long = self.state.state["skipped_samples"]

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in (self.reader, *self.eval_readers.values()):
            reader.close()

    @property
    def headline(self) -> str:
        """What the progress line shows beside the reward: the only task's headline."""
        return next(iter(self.tasks.values())).headline if len(self.tasks) == 1 else "reward"

    def _keep_reference(self) -> None:
        """The frozen start is the model the run began from, also when it goes on from a checkpoint."""
        if self.checkpoint and self.config.lora_r == 0:
            start, _, _ = load_model(model_path(self.config.model), next(self.vlm.model.parameters()).dtype)
            fresh = VLM(start.to(self.vlm.device), self.vlm.processor, attention=self.vlm.attention)
            self.vlm.reference = fresh.model.requires_grad_(False)
        else:
            self.vlm.keep_reference()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Metrics of each task's held-out split, its headline first."""
        evaluated = {}
        for name, samples in self.held_out.items():
            task, reader = self.tasks[name], self.eval_readers[name]
            metrics = evaluate(self.vlm, task, samples, reader, self.config, self.processes).metrics
            first = {key: value for key, value in metrics.items() if key == task.headline}
            evaluated[name] = first | metrics
        return evaluated

    def save(self, step: int) -> None:
        """A checkpoint from which the run goes on as if it had never stopped."""
        skipped = [int(count) for count in skip_counts(self.reader.skipped, self.processes).values()]
        if self.processes.is_main:
            optimizer = self.trainer.optimizer
            save_checkpoint(
                self.folder,
                step,
                lambda folder: save_model_files(self.vlm, folder),
                optimizer_tensors(optimizer.adamw, optimizer.named) | self._moved_reference(),
                {
                    "skipped_steps": optimizer.skipped_steps,
                    "skipped_samples": skipped,
                    "spikes": asdict(self.trainer.spikes),
                },
                self.config.save_total_limit,
            )
        self.processes.wait()

    def _moved_reference(self) -> dict[str, Tensor]:
        """The reference's weights where they are no longer the start's."""
        if not self.config.sync_ref_model:
            return {}
        return reference_tensors(self.vlm.reference, [name for name, _ in self.trainer.optimizer.named])

    def step(self, number: int) -> StepResult:
        """Step 1, 2, …"""
        config = self.config

        def spares(attempt: int) -> Sequence[Sample]:
            return self.spares.step((number - 1) * config.max_resamples + attempt + 1, config.prompts_per_step)

        return self.trainer.step(number, self.coming.samples(number), spares)


def check_run(config: TrainConfig) -> None:
    """Raise UserError for options of which no run can be made. It finds the tasks, but reads no data and no model."""
    splits = {"train_split": config.train_split, "eval_split": config.eval_split}
    check_mixture(list(bind_tasks(config, demo=config.model == "tiny")), config.task_weights, splits)
    check_model(config)
    check_adapter(config, config.lora_r)
    check(config)


def train(config: TrainConfig, processes: Processes) -> None:
    """Run the job that the options describe, from its first step or from a checkpoint.

    The options were checked before, once, by `check_run`.
    """
    with Run(config, processes) as run, held(run.folder) if processes.is_main else nullcontext():
        _train(run)


def _train(run: Run) -> None:
    config, processes = run.config, run.processes
    processes.wait()  # all have seen the folder as it was
    if processes.is_main:
        begin_run(run.folder, run.yaml, run.state.step if run.state else None)
        keep_newest(run.folder, config.save_total_limit)
        print(_greeting(run), flush=True)
    before = _first_evaluation(run)
    with _Out(run) as out:
        if before and run.first == 1:
            out.write(0, eval_metrics(before, len(run.tasks)))
        after, used = before, 0.0
        if run.first > config.max_steps:  # killed between its last checkpoint and its end
            after = run.evaluate()
        for number in range(run.first, config.max_steps + 1):
            result = run.step(number)
            last = number == config.max_steps
            used += result.metrics["num_prompts"]
            if not used:
                drawn = number * config.prompts_per_step
                check_used(run.reader.skipped, result.metrics, drawn, len(run.mixture), last)
            evaluated: dict[str, dict[str, float]] = {}
            if last or (config.eval_steps and number % config.eval_steps == 0):
                evaluated = after = run.evaluate()
            out.step(number, result, evaluated)
            if config.save_steps and (number % config.save_steps == 0 or last):
                run.save(number)
    if processes.is_main:
        save_model(run.folder, lambda folder: save_model_files(run.vlm, folder))
        if before and after:
            print(f"\n{_table(run, before, after)}")
        print(f"\nmodel, metrics and rollouts: {run.folder}", flush=True)
    processes.wait()


def _table(run: Run, before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> str:
    """Metrics before and after, with what they are of."""
    changes = []
    for name, metrics in after.items():
        title = f"{run.eval_splits[name]}, {metrics['num_samples']:.0f} samples, greedy"
        old, new = _without_count(before[name]), _without_count(metrics)
        changes.append(Change(title, old, new, run.tasks[name].headline))
    if len(run.tasks) == 1:
        [change] = changes
        return f"{change.title}:\n{before_after_table(change.before, change.after, change.headline)}"
    return grouped_table([replace(c, title=f"{n}: {c.title}") for n, c in zip(after, changes, strict=True)])


def _without_count(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "num_samples"}


def _first_evaluation(run: Run) -> dict[str, dict[str, float]]:
    """Metrics before the first step, by task. A resumed run reads what its beginning wrote."""
    path = run.folder / "metrics_before.json"
    if run.first > 1:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not run.held_out:
        return {}
    if run.processes.is_main:
        of_tasks = [
            f"{len(run.held_out[name])} samples of {name + ' ' if len(run.tasks) > 1 else ''}{split}"
            for name, split in run.eval_splits.items()
        ]
        print(f"evaluating {', '.join(of_tasks)} before the first step", flush=True)
    metrics = run.evaluate()
    if run.processes.is_main:
        try:
            write_whole(path, json.dumps(metrics).encode())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error} (output_dir)") from error
    return metrics


class _Out:
    """Files and progress line of the main process; nothing on the others."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.writer: MetricsWriter | None = None
        self.progress: Progress | None = None
        self.said: set[str] = set()  # each skipped sample is named once, not in every epoch

    def __enter__(self) -> "_Out":
        if self.run.processes.is_main:
            resumed = self.run.state.step if self.run.state else None
            self.writer = MetricsWriter(self.run.folder, resumed)
            self.progress = Progress(self.run.config.max_steps, self.run.headline, start=self.run.first - 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer and self.progress:
            self.writer.close()
            self.progress.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self.writer:
            self.writer.write(step, metrics)

    def step(self, number: int, result: StepResult, evaluated: Mapping[str, dict[str, float]]) -> None:
        """`evaluated`: metrics by task, where the step was followed by an evaluation."""
        run, every = self.run, self.run.config.rollout_steps
        rows = run.processes.gather(result.rows) if every and number % every == 0 else []
        readers = (run.reader, *run.eval_readers.values())
        messages = run.processes.gather([m for reader in readers for m in reader.skipped.take_messages()])
        if not self.writer or not self.progress:
            return
        if rows:
            write_rollouts(run.folder, number, rows)
        self.write(number, result.metrics | eval_metrics(evaluated, len(run.tasks)))
        for message in dict.fromkeys(m for m in messages if m not in self.said):
            self.progress.say(f"skipped: {message}")
        self.said.update(messages)
        for name, metrics in evaluated.items():
            headline = run.tasks[name].headline
            if headline in metrics:
                what = f"{run.eval_splits[name]} {headline}" if len(run.tasks) == 1 else f"{name} {headline}"
                self.progress.say(f"step {number} · {what} {metrics[headline]:.4f}")
        part = result.metrics.get(f"rewards/{run.headline}/mean", result.metrics["reward"])
        self.progress.update(result.metrics | {run.headline: part}, result.num_tokens)


def _greeting(run: Run) -> str:
    vlm, config = run.vlm, run.config
    lines = [run.yaml.rstrip()]
    for name, samples in run.mixture.samples.items():
        held_out = len(run.held_out.get(name, ()))
        lines.append(f"task: {name} · {len(samples)} samples to train on, {held_out} held out")
    lines += [
        f"model: {config.model} · family {vlm.config.model_type} · coordinates {vlm.family.coordinates} · "
        f"positions {vlm.family.positions} · mask {vlm.family.mask}",
        f"attention: {attention_summary(vlm, config)}",
        f"device: {vlm.device} × {run.processes.count} · {parameter_summary(vlm)}",
    ]
    for name, task in run.tasks.items():
        of_task = f" of {name}" if len(run.tasks) > 1 else ""
        lines.append(f"metric{of_task}: {task.headline}{' · ' + task.metric_note if task.metric_note else ''}")
        prompts = PromptReader(vlm.prompts, task, config, run.reader.limit).read([run.mixture.samples[name][0]])
        lines += [f"first prompt{of_task}: {p.text!r} · {len(p.ids)} tokens" for p in prompts]
    lines.append(f"output folder: {run.folder}" + (f" · resumed after step {run.state.step}" if run.state else ""))
    for name, task in run.tasks.items() if config.model == "tiny" else ():
        where = f"task_args.{name}" if len(run.tasks) > 1 else "task_args"
        args = config.task_args.get(name, {}) if len(run.tasks) > 1 else config.task_args
        given = ", ".join(f"{k}={v}" for k, v in {**task.demo_args, **args}.items())
        if task.demo_args:
            lines.append(f"the shipped tiny model trains with {where} {given}; name model= and {where} for your own")
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].replace(":", "-")


def main(argv: Sequence[str]) -> None:
    """Train as the options say."""
    config = load_config(TrainConfig, argv)
    check_run(config)
    train(config, start_processes())


if __name__ == "__main__":
    from vlm_grpo.common.program import run as run_program

    run_program(main)
