"""Penalties on rewards, and factors of single tokens in the objective.

Letters: K thoughts (pieces of thoughts, where thoughts branch), M answers of each, Q sampled tokens of one tree in its
order: thought 0, its answers, thought 1, …
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.algorithm.objectives import KL_ESTIMATORS, MAX_LOG_RATIO, LossConfig
from vlm_grpo.common.options import Range
from vlm_grpo.tree.types import RolloutTree


@dataclass
class ShapingConfig:
    """Length penalty and dynamic sampling."""

    ROOM = "algorithm"

    # Soft overlong penalty: over the last so many tokens before max_thought_length + max_answer_length an answer's
    # reward falls linearly by up to 1, by the length of its thought and itself; none: no penalty
    soft_punish_cache: Annotated[int | None, Range(at_least=1)] = None
    # A prompt whose rewards are all equal: none, it stays one of the minibatch's and teaches nothing; drop, it is in no
    # denominator; resample, another sample takes its place
    dynamic_sampling: Literal["none", "drop", "resample"] = "none"
    # How often a place of the step is sampled anew with dynamic_sampling=resample; after that its prompt stays
    max_resamples: Annotated[int, Range(at_least=1)] = 4


def path_lengths(tree: RolloutTree) -> Int[Tensor, "K M"]:
    """Number of sampled tokens from the prompt to the end of each answer, or of a thought that has no answers."""
    return path_sums(tree, torch.tensor(segment_lengths(tree)))


def path_sums(tree: RolloutTree, values: Tensor) -> Tensor:
    """Sums (K, M) of the segments' values from the prompt to each answer, or to a thought that has no answers.

    `values` has one value for each thought and answer, in the tree's order.
    """
    width = max(len(t.answers) for t in tree.thoughts)
    above: list[Tensor] = []  # for each thought, the sum from the prompt to its end
    rows: list[Tensor] = []
    place = 0
    for thought in tree.thoughts:
        above.append(values[place] + (above[thought.parent] if thought.parent >= 0 else 0))
        answers = values[place + 1 : place + 1 + len(thought.answers)]
        rows.append(above[-1] + (answers if len(answers) else answers.new_zeros(width)))
        place += 1 + len(answers)
    return torch.stack(rows)


def soft_overlong(lengths: Int[Tensor, "*n"], max_length: int, cache: int) -> Float[Tensor, "*n"]:
    """The length penalty of DAPO (arXiv 2503.14476): 0 up to max_length - cache, then falling to -1 at max_length.

    >>> soft_overlong(torch.tensor([3, 6, 8, 10, 11]), max_length=10, cache=4).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


def path_divergence(
    tree: RolloutTree, ref_logprobs: Float[Tensor, " Q"], config: LossConfig
) -> tuple[Float[Tensor, "K M"], float]:
    """The estimated KL divergence from the reference: summed over the tokens of each path from the prompt to an answer,
    and summed over all tokens of the tree.
    """
    gap = ref_logprobs.double() - tree_logprobs(tree).double()
    kl = KL_ESTIMATORS[config.kl_estimator](gap)
    of_segment = torch.stack([part.sum() for part in kl.split(segment_lengths(tree))])
    return path_sums(tree, of_segment), float(kl.sum())


def segment_lengths(tree: RolloutTree) -> list[int]:
    """Number of sampled tokens of each thought and answer, in the tree's order."""
    return [len(x.ids) for t in tree.thoughts for x in (t, *t.answers)]


def tree_logprobs(tree: RolloutTree) -> Float[Tensor, " Q"]:
    """Log-probabilities of the tree's tokens under the policy that sampled them."""
    return torch.cat([x.logprobs for t in tree.thoughts for x in (t, *t.answers)])


def tree_entropies(tree: RolloutTree) -> Float[Tensor, " Q"]:
    """Entropies of the distributions from which the tree's tokens were sampled."""
    return torch.cat([x.entropies for t in tree.thoughts for x in (t, *t.answers)])


def entropy_threshold(entropies: Sequence[float], quantile: float) -> float:
    """The lowest entropy among the share `quantile` of tokens with the highest entropies (arXiv 2506.01939).

    >>> entropy_threshold([0.1, 0.5, 0.2, 0.9, 0.3], quantile=0.5)
    0.3
    """
    return float(np.quantile(np.asarray(entropies), 1 - quantile)) if len(entropies) else -math.inf


def importance_weights(
    logprobs: Float[Tensor, " Q"], sampling_logprobs: Float[Tensor, " Q"], cap: float
) -> Float[Tensor, " Q"]:
    """min(π_old(token) / μ(token), cap): truncated importance sampling, without a gradient.

    μ is the engine that sampled the tokens, π_old is the trained model with the weights it had then.

    >>> importance_weights(torch.tensor([0.5, 0.25, 0.8]).log(), torch.tensor([0.25, 0.5, 0.1]).log(), cap=4.0).tolist()
    [2.0, 0.5, 4.0]
    """
    log_ratio = (logprobs - sampling_logprobs).detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
