"""The tasks and splits of an evaluation, and its options."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.names import nearest
from vlm_grpo.common.options import Range
from vlm_grpo.data.reader import DataConfig
from vlm_grpo.data.tasks import TaskConfig, split_samples, task_names, tasks_of
from vlm_grpo.model.load import ModelConfig
from vlm_grpo.rollout.sampling import SEEDS, SamplingConfig
from vlm_grpo.task.interface import Samples, TaskAdapter


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
