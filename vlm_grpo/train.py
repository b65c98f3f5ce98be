"""The main job.

    accelerate launch -m vlm_grpo.train task=refcoco

Options stand as key=value, defaults are in `TrainConfig` and its owners; `help=true` lists them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_grpo.checkpoint import (
    begin_run,
    find_resume,
    keep_newest,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    save_checkpoint,
    save_model,
    write_whole,
)
from vlm_grpo.config import load_config, resolved_yaml
from vlm_grpo.data import DataConfig, PromptReader, TaskConfig, skip_counts, split_samples, step_indices, task_of
from vlm_grpo.errors import UserError
from vlm_grpo.evaluate import Evaluation, evaluate, prompt_limit
from vlm_grpo.load import (
    ModelConfig,
    attention_summary,
    load_model,
    load_vlm,
    model_path,
    parameter_summary,
    save_model_files,
)
from vlm_grpo.metrics import MetricsWriter, Progress, before_after_table, write_rollouts
from vlm_grpo.processes import Processes, start_processes
from vlm_grpo.task import Sample
from vlm_grpo.trainer import StepConfig, StepResult, Trainer, check_step_options
from vlm_grpo.vlm import VLM


@dataclass
class TrainConfig(StepConfig, DataConfig, ModelConfig, TaskConfig):
    """A training run."""

    # Folder of checkpoints, metrics and rollouts; none: runs/TASK-MODEL
    output_dir: str | None = None
    # true: go on from the newest checkpoint of output_dir; a path: from that one
    resume_from_checkpoint: bool | str = False
    # Held-out split that is evaluated before, during and after training; empty: none
    eval_split: str = "val"
    # Use only the first so many of its samples; none: all
    eval_samples: int | None = 256
    # Steps between evaluations; 0: only before and after
    eval_steps: int = 80
    # Steps between checkpoints; 0: none but the final model
    save_steps: int = 80
    # Keep so many of the newest checkpoints
    save_total_limit: int = 2
    # Write the rollouts of every so many steps; 0: none
    rollout_steps: int = 1


class Run:
    """One run: what is given to every step, and where its results go."""

    def __init__(self, config: TrainConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.folder = Path(config.output_dir or f"runs/{_short(config.task)}-{_short(config.model)}")
        self.adapter = task_of(config, demo=config.model == "tiny")
        self.samples = split_samples(self.adapter, config.train_split, config.max_samples)
        self.held_out = self._held_out()
        self.yaml = resolved_yaml(config)
        self.checkpoint = find_resume(self.folder, config.resume_from_checkpoint, self.yaml)
        self.state = load_checkpoint(self.checkpoint) if self.checkpoint else None
        self.first = self.state.step + 1 if self.state else 1
        self.vlm = load_vlm(config, config.temperature, processes.device, self.checkpoint)
        self.reader = PromptReader(
            self.vlm, self.adapter, config, prompt_limit(self.vlm, config, config.max_prompt_length)
        )
        self.eval_reader = PromptReader(self.vlm, self.adapter, config, self.reader.limit)
        if config.beta > 0:
            self._keep_reference()
        self.trainer = Trainer(self.vlm, self.adapter, self.reader, config, processes)
        if self.state:
            load_optimizer(self.trainer.optimizer.adamw, self.trainer.optimizer.named, self.state.tensors)
            self.trainer.optimizer.skipped_steps = self.state.state["skipped_steps"]
            if processes.is_main:  # saved as sums over the processes
                self.reader.skipped.bad, self.reader.skipped.long = self.state.state["skipped_samples"]

    def _held_out(self) -> Sequence[Sample]:
        if not self.config.eval_split:
            return []
        return split_samples(self.adapter, self.config.eval_split, self.config.eval_samples, "eval_samples")

    def _keep_reference(self) -> None:
        """The frozen start is the model the run began from, also when it goes on from a checkpoint."""
        if self.checkpoint and self.config.lora_r == 0:
            start, _, _ = load_model(model_path(self.config.model), next(self.vlm.model.parameters()).dtype)
            fresh = VLM(start.to(self.vlm.device), self.vlm.processor, attention=self.vlm.attention)
            self.vlm.reference = fresh.model.requires_grad_(False)
        else:
            self.vlm.keep_reference()

    def evaluate(self) -> Evaluation | None:
        """Metrics of the held-out split, None without one."""
        if not self.held_out:
            return None
        return evaluate(self.vlm, self.adapter, self.held_out, self.eval_reader, self.config, self.processes)

    def save(self, step: int) -> None:
        """A checkpoint from which the run goes on as if it had never stopped."""
        skipped = [int(count) for count in skip_counts(self.reader.skipped, self.processes).values()]
        if self.processes.is_main:
            optimizer = self.trainer.optimizer
            save_checkpoint(
                self.folder,
                step,
                lambda folder: save_model_files(self.vlm, folder),
                optimizer_tensors(optimizer.adamw, optimizer.named),
                {"skipped_steps": optimizer.skipped_steps, "skipped_samples": skipped},
                self.config.save_total_limit,
            )
        self.processes.wait()

    def step(self, number: int) -> StepResult:
        """Step 1, 2, …"""
        indices = step_indices(len(self.samples), self.config.prompts_per_step, number, self.config.seed)
        return self.trainer.step(number, [self.samples[i] for i in indices])


def train(config: TrainConfig, processes: Processes) -> None:
    """Run the job that the options describe, from its first step or from a checkpoint."""
    for name, least in (("save_total_limit", 1), ("save_steps", 0), ("eval_steps", 0), ("rollout_steps", 0)):
        if getattr(config, name) < least:
            raise UserError(f"{name}={getattr(config, name)}: must be at least {least}")
    check_step_options(config)
    run = Run(config, processes)
    processes.wait()  # all have seen the folder as it was
    if processes.is_main:
        begin_run(run.folder, run.yaml, run.state.step if run.state else None)
        keep_newest(run.folder, config.save_total_limit)
        print(_greeting(run), flush=True)
    before = _first_evaluation(run)
    with _Out(run) as out:
        if before is not None and run.first == 1:
            out.write(0, {f"eval/{name}": value for name, value in before.items()})
        after = before
        if run.first > config.max_steps:  # killed between its last checkpoint and its end
            evaluation = run.evaluate()
            after = evaluation.metrics if evaluation else None
        for number in range(run.first, config.max_steps + 1):
            result = run.step(number)
            last = number == config.max_steps
            metrics = result.metrics
            if run.held_out and (last or (config.eval_steps and number % config.eval_steps == 0)):
                evaluation = run.evaluate()
                after = evaluation.metrics if evaluation else None
                metrics = metrics | {f"eval/{name}": value for name, value in (after or {}).items()}
            out.step(number, result, metrics)
            if config.save_steps and (number % config.save_steps == 0 or last):
                run.save(number)
    if processes.is_main:
        save_model(run.folder, lambda folder: save_model_files(run.vlm, folder))
        if before and after:
            print(f"\n{config.eval_split}, {after['num_samples']:.0f} samples, greedy:")
            print(before_after_table(_without_count(before), _without_count(after), run.adapter.headline))
        print(f"\nmodel, metrics and rollouts: {run.folder}", flush=True)
    processes.wait()


def _without_count(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "num_samples"}


def _first_evaluation(run: Run) -> dict[str, float] | None:
    """Metrics before the first step. A resumed run reads what its beginning wrote."""
    path = run.folder / "metrics_before.json"
    if run.first > 1 and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if run.first > 1:
        return None
    if run.held_out and run.processes.is_main:
        print(f"evaluating {len(run.held_out)} samples of {run.config.eval_split} before the first step", flush=True)
    evaluation = run.evaluate()
    if evaluation is not None and run.processes.is_main:
        try:
            write_whole(path, json.dumps(evaluation.metrics).encode())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error} (output_dir)") from error
    return evaluation.metrics if evaluation else None


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
            self.progress = Progress(self.run.config.max_steps, self.run.adapter.headline, start=self.run.first - 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer and self.progress:
            self.writer.close()
            self.progress.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self.writer:
            self.writer.write(step, metrics)

    def step(self, number: int, result: StepResult, metrics: dict[str, float]) -> None:
        every = self.run.config.rollout_steps
        rows = self.run.processes.gather(result.rows) if every and number % every == 0 else []
        messages = [m for reader in (self.run.reader, self.run.eval_reader) for m in reader.skipped.take_messages()]
        messages = self.run.processes.gather(messages)
        if not self.writer or not self.progress:
            return
        if rows:
            write_rollouts(self.run.folder, number, rows)
        self.write(number, metrics)
        headline = self.run.adapter.headline
        shown = metrics | {headline: metrics.get(f"rewards/{headline}/mean", metrics["reward"])}
        for message in dict.fromkeys(m for m in messages if m not in self.said):
            self.progress.say(f"skipped: {message}")
        self.said.update(messages)
        if f"eval/{headline}" in metrics:
            value = metrics[f"eval/{headline}"]
            self.progress.say(f"step {number} · {self.run.config.eval_split} {headline} {value:.4f}")
        self.progress.update(shown, result.num_tokens)


def _greeting(run: Run) -> str:
    vlm, adapter = run.vlm, run.adapter
    prompt = PromptReader(vlm, adapter, run.config, run.reader.limit).read([run.samples[0]])
    lines = [
        run.yaml.rstrip(),
        f"task: {run.config.task} · {len(run.samples)} samples to train on, {len(run.held_out)} held out",
        f"model: {run.config.model} · family {vlm.config.model_type} · coordinates {vlm.family.coordinates} · "
        f"positions {vlm.family.positions} · mask {vlm.family.mask}",
        f"attention: {attention_summary(vlm, run.config)}",
        f"device: {vlm.device} × {run.processes.count} · {parameter_summary(vlm)}",
        f"metric: {adapter.headline}{' · ' + adapter.metric_note if adapter.metric_note else ''}",
        *(f"first prompt: {p.text!r} · {len(p.ids)} tokens" for p in prompt),
        f"output folder: {run.folder}" + (f" · resumed after step {run.state.step}" if run.state else ""),
    ]
    if run.config.model == "tiny" and adapter.demo_args:
        given = ", ".join(f"{k}={v}" for k, v in {**adapter.demo_args, **run.config.task_args}.items())
        lines.append(f"the shipped tiny model trains with task_args {given}; name model= and task_args for your own")
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].replace(":", "-")


def main(argv: Sequence[str]) -> None:
    """Train as the options say."""
    config = load_config(TrainConfig, argv)
    train(config, start_processes())


if __name__ == "__main__":
    from vlm_grpo.program import run as run_program

    run_program(main)
