"""Metrics on splits: answers of the same engine, or files of predictions.

    accelerate launch -m vlm_grpo.evaluate task=refcoco split=testA model=PATH
    accelerate launch -m vlm_grpo.evaluate task=[refcoco,vqav2] split=[val,test] splits.vqav2=val model=PATH

An evaluation that was killed goes on where it was when it is started again with the same options: whatever a batch of
answers has completed is kept in the output folder until the whole call is done (see predictions.Journal). A folder with
the results of other weights, settings or data is refused, so that no evaluation is lost by another.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vlm_grpo.answering import (
    evaluate,
    prompt_limit,
    run_notes,
    samples_digest,
    score_predictions,
    weights_digest,
)
from vlm_grpo.config import load_config, refuse_idle, resolved_yaml
from vlm_grpo.data import (
    DataConfig,
    PromptReader,
    TaskConfig,
    skip_counts,
    split_samples,
    task_names,
    tasks_of,
)
from vlm_grpo.errors import UserError
from vlm_grpo.load import ModelConfig, load_vlm
from vlm_grpo.measure import Evaluation, intervals, sample_ids
from vlm_grpo.names import nearest
from vlm_grpo.options import Range
from vlm_grpo.predictions import (
    Journal,
    Prediction,
    check_finished,
    finish,
    predictions_digest,
    predictions_file,
    take_up,
)
from vlm_grpo.processes import Processes, start_processes
from vlm_grpo.results import (
    Row,
    check_table,
    console_table,
    metrics_table,
    official_files,
    rows_of,
    write_evaluation,
    write_summary,
)
from vlm_grpo.sampling import DRAW_OPTIONS, SEEDS, SamplingConfig
from vlm_grpo.task import Samples, TaskAdapter

# What answers depend on beside the model's weights, the task, its arguments and the split; the rest may differ between
# an evaluation and its continuation. So may on_bad_sample and on_long_prompt: what ends under `error` has left out
# nothing, and ends the same under `skip`
ANSWER_OPTIONS = (
    *("max_thought_length", "max_answer_length", "max_prompt_length", "ignore_eos"),
    *("dtype", "min_pixels", "max_pixels"),
)
SAMPLE_OPTIONS = (*DRAW_OPTIONS, "temperature", "seed")
# What an evaluation inherits and has no use for
TRAINING_OPTIONS = ("train_split", "freeze_vision", "gradient_checkpointing", "lora_r", "lora_alpha")


@dataclass
class EvaluateConfig(SamplingConfig, DataConfig, ModelConfig, TaskConfig):
    """Evaluation on splits."""

    ROOM = "program"
    FIRST = (
        *("task", "task_args", "split", "model", "predictions", "output_dir"),
        *("max_thought_length", "max_answer_length", "decoding"),
    )

    # Split to evaluate, or a list of splits, of every task
    split: str | list[str] = "val"
    # Split or splits of a task that differ from those, by its name: splits.refcoco=[testA,testB]
    splits: dict[str, Any] = field(default_factory=dict)
    # Folder of the results; none: evaluations/TASK-SPLIT-MODEL. Of several tasks or splits each has a folder TASK-SPLIT
    # in it; none is then evaluations/TASK+TASK-MODEL. Results of another model or with other settings are not replaced
    output_dir: str | None = None
    # Score this file of {"id", "answer"} lines (answers in original-image coordinates) instead of running a model; for
    # several tasks or splits a folder with a file TASK-SPLIT.jsonl, or TASK-SPLIT/predictions.jsonl, for each. Lines
    # with a "thought_index" or "answer_index" of their own are several answers to a sample, scored as drawn ones
    predictions: str | None = None
    # greedy: one thought and one answer of the likeliest tokens. sample: num_thoughts thoughts with num_answers answers
    # each are drawn, and pass@k and majority votes stand beside the metrics, which are means over all answers
    decoding: Literal["greedy", "sample"] = "greedy"
    # Seed of drawn answers and of the resamples behind the intervals
    seed: Annotated[int, SEEDS] = 0
    # Resamples behind the 95% intervals; 0: no intervals
    bootstrap_samples: Annotated[int, Range(at_least=0)] = 1000


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


def default_folder(title: str, config: EvaluateConfig) -> str:
    """The folder of results where none is given, named by the last two parts of what gave the answers.

    >>> default_folder("refcoco-val", EvaluateConfig(model="Qwen/Qwen2.5-VL-3B-Instruct"))
    'evaluations/refcoco-val-Qwen-Qwen2.5-VL-3B-Instruct'
    >>> default_folder("refcoco-val", EvaluateConfig(model="/data/runs/mine/checkpoint-80/"))
    'evaluations/refcoco-val-mine-checkpoint-80'
    """
    source = Path((config.predictions or config.model).removesuffix(".jsonl"))
    name = re.sub(r"[^\w.+-]+", "-", "-".join(source.parts[-2:])).strip("-.")
    return f"evaluations/{title}-{name or 'here'}"


def job_name(task: str, split: str) -> str:
    """The name of folders and files of a task's split."""
    return f"{task}-{split}".replace("/", "-").replace(":", "-")


def split_option(config: EvaluateConfig, task: str) -> str:
    """The option that names the splits of a task."""
    return f"splits.{task}" if task in config.splits else "split"


def chosen_splits(config: EvaluateConfig) -> dict[str, list[str]]:
    """The splits of each task. Raises: UserError for splits of tasks that are not evaluated, none, or one twice."""
    names = task_names(config)
    for key in config.splits:
        if key not in names:
            near = nearest(key, names)
            hint = f" Did you mean splits.{near}?" if near else ""
            raise UserError(f"splits.{key}: no task of that name is evaluated, only {', '.join(names)}.{hint}")
    found = {}
    for name in names:
        option = split_option(config, name)
        given = config.splits.get(name, config.split)
        chosen = given if isinstance(given, list) else [given]
        chosen = [str(split) if type(split) is int else split for split in chosen]  # as YAML reads 2017
        wrong = not chosen or not all(isinstance(split, str) and split for split in chosen)
        if wrong or len(set(chosen)) < len(chosen):
            raise UserError(f"{option}={given}: it must be the name of a split, or a list of names, each of them once")
        found[name] = chosen
    return found


def plan(config: EvaluateConfig) -> list[Job]:
    """All tasks and splits that the options name, checked before the first of them is answered."""
    splits = chosen_splits(config)
    adapters = tasks_of(config, demo=config.model == "tiny" and config.predictions is None)
    pairs = [(name, split) for name, of_task in splits.items() for split in of_task]
    names = [job_name(*pair) for pair in pairs]
    alone = len(pairs) == 1
    folder = Path(config.output_dir or default_folder(names[0] if alone else "+".join(splits), config))
    if len(set(names)) < len(names):
        raise UserError(f"task and split: two of {', '.join(names)} have the same folder; rename a task: NAME=TASK")
    jobs = []
    for (task, split), name in zip(pairs, names, strict=True):
        try:
            samples = split_samples(adapters[task], split, config.max_samples)
        except UserError as error:
            raise UserError(f"{split_option(config, task)}={split}: {error}") from error
        jobs.append(Job(task, split, adapters[task], samples, folder if alone else folder / name))
    return jobs


class Evaluator:
    """All jobs of a call with what they share: the options, the processes and the model, if there is one."""

    def __init__(self, config: EvaluateConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.jobs = plan(config)
        self.vlm = None if config.predictions is not None else load_vlm(config, config.temperature, processes.device)
        self.weights = "" if self.vlm is None else weights_digest(self.vlm)
        self.limit = 0 if self.vlm is None else prompt_limit(self.vlm, config, config.max_prompt_length)
        alone = len(self.jobs) == 1
        self.folder = self.jobs[0].folder if alone else self.jobs[0].folder.parent  # of the table
        given = Path(config.predictions) if config.predictions is not None else None
        self.files = {job.name: predictions_file(given, job.name, alone) for job in self.jobs} if given else {}
        self.notes = {job.name: self._notes(job) for job in self.jobs}
        self.facts = {job.name: self._facts(job) for job in (self.jobs if processes.is_main else ())}

    def check_folders(self) -> None:
        """Raise UserError if the files of this call would replace those of another."""
        check_table(self.folder, [job.name for job in self.jobs])
        for job in self.jobs:
            check_finished(job.folder, self.facts[job.name])

    def _notes(self, job: Job) -> dict[str, str]:
        """What moves the numbers of a job, as far as it is known before the first answer."""
        notes = {"task": job.task, "split": job.split, "metric": job.adapter.metric_note}
        if self.vlm is None:
            return notes | {"decoding": f"none: answers of {self.files[job.name]}"}
        reader = PromptReader(self.vlm.prompts, job.adapter, self.config, self.limit)
        notes |= {"model": self.config.model, **run_notes(self.vlm, reader, job.samples)}
        return notes | {"decoding": decoding_note(self.config)}

    def answer(self, job: Job) -> tuple[Evaluation, dict[str, str]]:
        """Evaluate one task on one split; and what moves its numbers."""
        config, processes, notes = self.config, self.processes, dict(self.notes[job.name])
        if self.vlm is None:
            evaluation = score_predictions(job.adapter, job.samples, self.files[job.name], processes)
            if missing := evaluation.metrics["num_missing"]:
                notes["decoding"] += f", which lacks {missing:.0f}"
            return evaluation, notes
        ids = set(sample_ids(job.samples))
        # Where a long prompt is an error, a length that lets it pass leaves every answer as it is
        free = ("max_prompt_length",) if config.on_long_prompt == "error" else ()
        left = take_up(job.folder, self.facts[job.name], free) if processes.is_main else []
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
        with PromptReader(self.vlm.prompts, job.adapter, config, self.limit) as reader:
            evaluation = evaluate(self.vlm, job.adapter, job.samples, reader, config, processes, seed, known, keep)
        notes |= {name: f"{count:.0f}" for name, count in skip_counts(reader.skipped, processes).items()}
        for message in processes.gather(reader.skipped.take_messages()):
            if processes.is_main:
                print(f"skipped: {message}", file=sys.stderr)
        if not evaluation.predictions:
            raise UserError(f"{job.name}: not one of {len(ids)} samples could be read (on_bad_sample, on_long_prompt)")
        return evaluation, notes

    def _facts(self, job: Job) -> dict[str, Any]:
        """What the answers of a job and their scores depend on."""
        names = task_names(self.config)
        args = self.config.task_args if len(names) == 1 else self.config.task_args.get(job.task, {})
        options = ANSWER_OPTIONS + (SAMPLE_OPTIONS if self.config.decoding == "sample" else ())
        facts = {
            "task": names[job.task],
            "task_args": args,
            "split": job.split,
            "data (a digest of ids, questions and targets)": samples_digest(job.samples),
        }
        if self.vlm is None:
            return facts | {"predictions (a digest of the file)": predictions_digest(self.files[job.name])}
        return facts | {
            "model's weights": self.weights,
            "first prompt": self.notes[job.name]["prompt"],
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
        facts = self.facts[job.name]
        write_evaluation(job.folder, evaluation, found, notes, facts, resolved_yaml(config), files)
        print("\n".join(f"{name}: {value}" for name, value in notes.items()))
        print(metrics_table(evaluation.metrics, found))
        print(f"in {job.folder}: {', '.join(['metrics.json', 'predictions.jsonl', *files])}\n", flush=True)
        return rows_of(job.task, job.split, job.adapter.headline, evaluation, found, notes["decoding"])


def check_evaluation(config: EvaluateConfig) -> None:
    """Raise UserError for options that do nothing in the evaluation that the others ask for."""
    refuse_idle(config, TRAINING_OPTIONS, "in an evaluation")
    if config.predictions is not None:
        refuse_idle(config, ("model", "decoding"), "with predictions=FILE, which is scored without a model")
    if config.decoding == "greedy":
        refuse_idle(config, (*DRAW_OPTIONS, "temperature"), "with decoding=greedy: set decoding=sample")


def main(argv: Sequence[str]) -> None:
    """Evaluate as the options say; files and the printed tables are the main process's."""
    config = load_config(EvaluateConfig, argv)
    check_evaluation(config)
    processes = start_processes()
    evaluator = Evaluator(config, processes)
    if processes.is_main:
        evaluator.check_folders()
    rows: list[Row] = []
    notes_of: dict[str, str] = {}
    for job in evaluator.jobs:
        evaluation, notes = evaluator.answer(job)
        if processes.is_main:
            rows += evaluator.write(job, evaluation, notes)
            notes_of[job.name] = f"{notes['metric']} · intervals: {notes['intervals']}"
    if processes.is_main:
        write_summary(evaluator.folder, rows, notes_of)
        print(console_table(rows))
        print(f"written: {evaluator.folder}, with summary.json and summary.md")
        for job in evaluator.jobs if evaluator.vlm else ():  # predictions=FILE leaves alone what a model has begun
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
