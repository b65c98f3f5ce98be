"""Metrics on splits: answers of the same engine, or files of predictions.

    accelerate launch -m vlm_grpo.evaluate task=refcoco split=testA model=PATH
    accelerate launch -m vlm_grpo.evaluate task=[refcoco,vqav2] split=[val,test] splits.vqav2=val model=PATH

An evaluation that was killed goes on where it was when it is started again with the same options: whatever a batch of
answers has completed is kept in the output folder until the whole call is done (see predictions.Journal). A folder with
the results of other weights, settings or data is refused, so that no evaluation is lost by another.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlm_grpo.common.config import load_config, refuse_idle, resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes, start_processes
from vlm_grpo.data.reader import PromptReader, skip_counts
from vlm_grpo.data.tasks import task_names
from vlm_grpo.evaluation.answering import (
    evaluate,
    prompt_limit,
    run_notes,
    samples_digest,
    score_predictions,
    weights_digest,
)
from vlm_grpo.evaluation.jobs import EvaluateConfig, Job, plan
from vlm_grpo.evaluation.measure import Evaluation, intervals, sample_ids
from vlm_grpo.evaluation.predictions import (
    Journal,
    Prediction,
    check_finished,
    finish,
    predictions_digest,
    predictions_file,
    take_up,
)
from vlm_grpo.evaluation.results import (
    Row,
    check_table,
    console_table,
    metrics_table,
    official_files,
    rows_of,
    write_evaluation,
    write_summary,
)
from vlm_grpo.model.load import load_vlm
from vlm_grpo.rollout.sampling import DRAW_OPTIONS

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
    from vlm_grpo.common.program import run

    run(main)
