"""Metrics on splits: answers of the same engine, or files of predictions.

    accelerate launch -m vlm_grpo.evaluate task=refcoco split=testA model=PATH
    accelerate launch -m vlm_grpo.evaluate task=[refcoco,vqav2] split=[val,test] splits.vqav2=val model=PATH

An evaluation that was killed goes on where it was when it is started again with the same options: whatever a batch of
answers has completed is kept in the output folder until the whole call is done (see predictions.Journal).
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlm_grpo.answering import (
    evaluate,
    prompt_limit,
    run_notes,
    samples_digest,
    score_predictions,
    weights_digest,
)
from vlm_grpo.config import load_config, resolved_yaml
from vlm_grpo.data import (
    DataConfig,
    PromptReader,
    TaskConfig,
    check_seed,
    skip_counts,
    split_samples,
    task_names,
    tasks_of,
)
from vlm_grpo.engine import SamplingConfig, check_sampling_options
from vlm_grpo.errors import UserError
from vlm_grpo.load import ModelConfig, load_vlm
from vlm_grpo.measure import Evaluation, intervals, sample_ids
from vlm_grpo.predictions import Journal, Prediction, finish, predictions_file, take_up
from vlm_grpo.processes import Processes, start_processes
from vlm_grpo.results import (
    Row,
    console_table,
    metrics_table,
    official_files,
    rows_of,
    write_evaluation,
    write_summary,
)
from vlm_grpo.task import Samples, TaskAdapter

# What answers depend on beside the model's weights, the task, its arguments and the split; the rest may differ between
# an evaluation and its continuation
ANSWER_OPTIONS = ("max_thought_length", "max_answer_length", "ignore_eos", "dtype", "min_pixels", "max_pixels")
SAMPLE_OPTIONS = ("num_thoughts", "num_answers", "temperature", "top_p", "top_k", "min_p", "seed")


@dataclass
class EvaluateConfig(SamplingConfig, DataConfig, ModelConfig, TaskConfig):
    """Evaluation on splits."""

    # Split to evaluate, or a list of splits, of every task
    split: str | list[str] = "val"
    # Split or splits of a task that differ from those, by its name: splits.refcoco=[testA,testB]
    splits: dict[str, Any] = field(default_factory=dict)
    # Folder of the results; none: evaluations/TASK-SPLIT. Of several tasks or splits each has a folder TASK-SPLIT in
    # it; none is then evaluations/TASK+TASK
    output_dir: str | None = None
    # Score this file of {"id", "answer"} lines (answers in original-image coordinates) instead of running a model; for
    # several tasks or splits a folder with a file TASK-SPLIT.jsonl, or TASK-SPLIT/predictions.jsonl, for each. Lines
    # with a "thought_index" or "answer_index" of their own are several answers to a sample, scored as drawn ones
    predictions: str | None = None
    # greedy: one thought and one answer of the likeliest tokens. sample: num_thoughts thoughts with num_answers answers
    # each are drawn, and pass@k and majority votes stand beside the metrics, which are means over all answers
    decoding: Literal["greedy", "sample"] = "greedy"
    # Seed of drawn answers and of the resamples behind the intervals
    seed: int = 0
    # Resamples behind the 95% intervals; 0: no intervals
    bootstrap_samples: int = 1000


@dataclass(frozen=True)
class Job:
    """One task on one of its splits."""

    task: str
    split: str
    adapter: TaskAdapter
    samples: Samples
    folder: Path

    @property
    def name(self) -> str:
        return job_name(self.task, self.split)


def job_name(task: str, split: str) -> str:
    """The name of folders and files of a task's split."""
    return f"{task}-{split}".replace("/", "-").replace(":", "-")


def splits_of(config: EvaluateConfig) -> dict[str, list[str]]:
    """The splits of each task. Raises: UserError for splits of tasks that are not evaluated, none, or one twice."""
    names = task_names(config)
    for key in config.splits:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f" Did you mean splits.{near[0]}?" if near else ""
            raise UserError(f"splits.{key}: no task of that name is evaluated, only {', '.join(names)}.{hint}")
    found = {}
    for name in names:
        option = f"splits.{name}" if name in config.splits else "split"
        given = config.splits.get(name, config.split)
        chosen = [given] if isinstance(given, str) else given
        wrong = (
            not isinstance(chosen, list) or not chosen or not all(isinstance(split, str) and split for split in chosen)
        )
        if wrong or len(set(chosen)) < len(chosen):
            raise UserError(f"{option}={given}: it must be the name of a split, or a list of names, each of them once")
        found[name] = list(chosen)
    return found


def plan(config: EvaluateConfig) -> list[Job]:
    """All tasks and splits that the options name, checked before the first of them is answered."""
    splits = splits_of(config)
    adapters = tasks_of(config, demo=config.model == "tiny" and config.predictions is None)
    pairs = [(name, split) for name, of_task in splits.items() for split in of_task]
    names = [job_name(*pair) for pair in pairs]
    alone = len(pairs) == 1
    folder = Path(config.output_dir or f"evaluations/{names[0] if alone else '+'.join(splits)}")
    if len(set(names)) < len(names):
        raise UserError(f"task and split: two of {', '.join(names)} have the same folder; rename a task: NAME=TASK")
    return [
        Job(
            task,
            split,
            adapters[task],
            split_samples(adapters[task], split, config.max_samples),
            folder if alone else folder / name,
        )
        for (task, split), name in zip(pairs, names, strict=True)
    ]


class Bench:
    """All jobs of a call with what they share: the options, the processes and the model, if there is one."""

    def __init__(self, config: EvaluateConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.jobs = plan(config)
        self.vlm = None if config.predictions is not None else load_vlm(config, config.temperature, processes.device)
        self.weights = "" if self.vlm is None else weights_digest(self.vlm)

    def answer(self, job: Job) -> tuple[Evaluation, dict[str, str]]:
        """Evaluate one task on one split; and what moves its numbers."""
        config, processes = self.config, self.processes
        notes = {"task": job.task, "split": job.split, "metric": job.adapter.metric_note}
        if self.vlm is None:
            path = predictions_file(Path(str(config.predictions)), job.name, alone=len(self.jobs) == 1)
            notes["decoding"] = f"none: answers of {path}"
            return score_predictions(job.adapter, job.samples, path, processes), notes
        limit = prompt_limit(self.vlm, config, config.max_prompt_length)
        notes |= run_notes(self.vlm, PromptReader(self.vlm, job.adapter, config, limit), job.samples)
        notes["decoding"] = decoding_note(config)
        ids = set(sample_ids(job.samples))
        left = take_up(job.folder, self._facts(job, notes)) if processes.is_main else []
        known = processes.gather([prediction for prediction in left if prediction.id in ids])
        count = len({prediction.id for prediction in known})
        if known and processes.is_main:
            print(f"{job.name}: {count} of {len(ids)} samples are answered already", file=sys.stderr, flush=True)
        journal = Journal(job.folder, processes.rank)
        say = _counter(job, count, processes) if processes.is_main else (lambda count: None)

        def keep(predictions: list[Prediction], count: int) -> None:
            journal.append(predictions)
            say(count)

        seed = config.seed if config.decoding == "sample" else None
        with PromptReader(self.vlm, job.adapter, config, limit) as reader:
            evaluation = evaluate(self.vlm, job.adapter, job.samples, reader, config, processes, seed, known, keep)
        notes |= {name: f"{count:.0f}" for name, count in skip_counts(reader.skipped, processes).items()}
        for message in processes.gather(reader.skipped.take_messages()):
            if processes.is_main:
                print(f"skipped: {message}", file=sys.stderr)
        return evaluation, notes

    def _facts(self, job: Job, notes: Mapping[str, str]) -> dict[str, Any]:
        """What the answers of a job depend on."""
        names = task_names(self.config)
        args = self.config.task_args if len(names) == 1 else self.config.task_args.get(job.task, {})
        options = ANSWER_OPTIONS + (SAMPLE_OPTIONS if self.config.decoding == "sample" else ())
        return {
            "task": names[job.task],
            "task_args": args,
            "split": job.split,
            "data (a digest of ids, questions and targets)": samples_digest(job.samples),
            "model's weights": self.weights,
            "first prompt": notes["prompt"],
            "decoding": self.config.decoding,
            **{name: getattr(self.config, name) for name in options},
        }

    def write(self, job: Job, evaluation: Evaluation, notes: dict[str, str]) -> list[Row]:
        """Write and print what a job has found; its rows of the table over all jobs."""
        config = self.config
        found, notes["intervals"] = intervals(
            job.adapter, job.samples, evaluation, config.bootstrap_samples, config.seed
        )
        files = official_files(job.adapter, job.samples, evaluation)
        write_evaluation(job.folder, evaluation, found, notes, resolved_yaml(config), files)
        print("\n".join(f"{name}: {value}" for name, value in notes.items()))
        print(metrics_table(evaluation.metrics, found))
        print(f"in {job.folder}: {', '.join(['metrics.json', 'predictions.jsonl', *files])}\n", flush=True)
        return rows_of(job.task, job.split, job.adapter.headline, evaluation, found, notes["decoding"])


def main(argv: Sequence[str]) -> None:
    """Evaluate as the options say; files and the printed tables are the main process's."""
    config = load_config(EvaluateConfig, argv)
    check_sampling_options(config)
    check_seed(config.seed)
    if config.bootstrap_samples < 0:
        raise UserError(f"bootstrap_samples={config.bootstrap_samples}: must be at least 0")
    processes = start_processes()
    bench = Bench(config, processes)
    rows: list[Row] = []
    notes_of: dict[str, str] = {}
    for job in bench.jobs:
        evaluation, notes = bench.answer(job)
        if processes.is_main:
            rows += bench.write(job, evaluation, notes)
            notes_of[job.name] = f"{notes['metric']} · intervals: {notes['intervals']}"
    if processes.is_main:
        folder = bench.jobs[0].folder if len(bench.jobs) == 1 else bench.jobs[0].folder.parent
        write_summary(folder, rows, notes_of)
        print(console_table(rows))
        print(f"written: {folder}, with summary.json and summary.md")
        for job in bench.jobs if bench.vlm else ():  # predictions=FILE leaves alone what a model has begun
            finish(job.folder)
    processes.wait()


def decoding_note(config: EvaluateConfig) -> str:
    """How the answers were made, as it stands beside every number."""
    if config.decoding == "greedy":
        return "greedy, one thought, one answer"
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    drawn = ", ".join(f"{name} {getattr(config, name):g}" for name in names)
    return f"sample, {config.num_thoughts} thoughts × {config.num_answers} answers, {drawn}"


def _counter(job: Job, known: int, processes: Processes) -> Callable[[int], None]:
    done = known

    def say(count: int) -> None:
        nonlocal done
        done += count * processes.count
        total = len(job.samples)
        print(f"{job.name}: answered about {min(total, done)} of {total}", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    from vlm_grpo.program import run

    run(main)
