"""From rollouts to rewards: an answer is taken back to original-image coordinates and scored by its task.

Beside the parts that the task names, every reward has the part `format`: 1 where the model wrote exactly one thought
and one answer, each ended by its own closing tag, else 0. Tags beyond these earn nothing: an answer with a tag inside
has no reward above 0, whatever the task's parser would find between its tags. A tag inside a thought costs the format
alone, for tasks do not see thoughts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.model.coordinates import answer_in_original
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task.interface import Reward, Sample, TaskAdapter, Tasks, by_name, task_name
from vlm_grpo.tree.tags import FormatMark, format_mark
from vlm_grpo.tree.types import RolloutTree

FORMAT_PART = "format"


@dataclass
class ScoreConfig:
    """Rewards."""

    ROOM = "rollout"

    # What an answer earns, on top of its task's reward, for exactly one thought and one answer, each ended by its
    # closing tag; 0: this is only reported, as rewards/format
    format_weight: Annotated[float, Range(at_least=0, below=math.inf)] = 0.0


class RewardWorkers:
    """The workers of a run's tasks, by name."""

    def __init__(self, tasks: Tasks) -> None:
        self.by_name = {name: RewardWorker(task) for name, task in by_name(tasks).items()}

    def of(self, sample: Sample) -> RewardWorker:
        """The worker of the sample's task."""
        return self.by_name[sample.task]

    def score_all(self, answers: Sequence[tuple[Sample, str]]) -> list[Reward | None]:
        """The reward of each answer by the worker of its sample."""
        rewards: list[Reward | None] = [None] * len(answers)
        for name, worker in self.by_name.items():
            places = [i for i, (sample, _) in enumerate(answers) if sample.task == name]
            for i, reward in zip(places, worker.score_all([answers[i] for i in places]), strict=True):
                rewards[i] = reward
        return rewards

    @property
    def timeouts(self) -> int:
        """Answers whose scoring was given up at a deadline, so far."""
        return sum(worker.timeouts for worker in self.by_name.values())


@dataclass(frozen=True)
class ScoredTree:
    """A tree with its rewards. `answers` are the texts that were scored, in original-image coordinates."""

    tree: RolloutTree
    answers: tuple[tuple[str, ...], ...]  # K × M; an empty row for a thought that was branched and has no answers
    rewards: tuple[tuple[Reward | None, ...], ...]  # the same; None: the task has no reward for this answer

    @property
    def values(self) -> Float[Tensor, "K M"]:
        """Rewards as numbers, NaN for none."""
        nothing = [math.nan] * max(map(len, self.rewards))
        return torch.tensor([[math.nan if r is None else r.value for r in row] or nothing for row in self.rewards])


def score_trees(
    workers: RewardWorkers, trees: Sequence[RolloutTree], config: ScoreConfig | None = None
) -> list[ScoredTree]:
    """Score every answer of every tree. Raises UserError, naming task and sample, where the task's reward fails."""
    config = config or ScoreConfig()
    adapters = [workers.of(tree.prompt.sample).adapter for tree in trees]
    texts = [
        tuple(tuple(answer_in_original(tree.prompt, a.text) for a in t.answers) for t in tree.thoughts)
        for tree in trees
    ]
    given = [(tree.prompt.sample, t) for tree, rows in zip(trees, texts, strict=True) for row in rows for t in row]
    rewards = iter(workers.score_all(given))
    scored = []
    for tree, adapter, rows in zip(trees, adapters, texts, strict=True):
        marks = [[format_mark(t.raw, a.raw) for a in t.answers] for t in tree.thoughts]
        found = tuple(tuple(_with_format(adapter, next(rewards), mark, config) for mark in row) for row in marks)
        scored.append(ScoredTree(tree, rows, found))
    return scored


def _with_format(task: TaskAdapter, reward: Reward | None, mark: FormatMark, config: ScoreConfig) -> Reward | None:
    if reward is None:
        return None
    if FORMAT_PART in reward.parts:
        raise UserError(
            f"task {task_name(task)}: its reward has a part {FORMAT_PART!r}, which is the trainer's own, about thought "
            "and answer tags; give the task's part another name"
        )
    value = min(reward.value, 0.0) if mark.nests_tags else reward.value
    parts: Mapping[str, float] = {**reward.parts, FORMAT_PART: float(mark.is_right)}
    return Reward(value + config.format_weight * mark.is_right, parts)
