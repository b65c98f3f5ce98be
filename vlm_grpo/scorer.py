"""From rollouts to rewards: an answer is taken back to original-image coordinates and scored by the task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.judge import Judge
from vlm_grpo.rollout import Answer, Prompt, RolloutTree
from vlm_grpo.task import Reward, TaskAdapter
from vlm_grpo.vlm import VLM


@dataclass(frozen=True)
class ScoredTree:
    """A tree with its rewards. `answers` are the texts that were scored, in original-image coordinates."""

    tree: RolloutTree
    answers: tuple[tuple[str, ...], ...]  # K × M
    rewards: tuple[tuple[Reward | None, ...], ...]  # K × M; None: the task has no reward for this answer

    @property
    def values(self) -> Float[Tensor, "K M"]:
        """Rewards as numbers, NaN for none."""
        return torch.tensor([[math.nan if r is None else r.value for r in row] for row in self.rewards])


def answer_text(vlm: VLM, adapter: TaskAdapter, prompt: Prompt, answer: Answer) -> str:
    """What the task scores: the answer's words, its boxes and points in pixels of the original image."""
    if adapter.coordinates and prompt.original_sizes:
        return vlm.answer_in_original(prompt, answer.text)
    return answer.text


def score_trees(vlm: VLM, judge: Judge, trees: Sequence[RolloutTree]) -> list[ScoredTree]:
    """Score every answer of every tree. Raises UserError, naming task and sample, where the task's reward fails."""
    scored = []
    for tree in trees:
        sample = tree.prompt.sample
        texts = tuple(tuple(answer_text(vlm, judge.adapter, tree.prompt, a) for a in t.answers) for t in tree.thoughts)
        rewards = tuple(tuple(judge.score(sample, text) for text in row) for row in texts)
        scored.append(ScoredTree(tree, texts, rewards))
    return scored
