"""The objectives: the table `OBJECTIVES` names them all, each made of pure functions of a few lines.

A sequence shares one advantage: it is a thought or an answer, or (credit=sequence) a thought with its answer. Letters:
Q sampled tokens in any order, from any trees; K or K×M sequences of a prompt, written "*k".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.common.options import Range

# Bound of log-ratios: exp() of it stays finite in float32, also when squared
MAX_LOG_RATIO = 20.0
CISPO_CAP = 5.0  # without epsilon_high: the value of ScaleRL, arXiv 2510.13786


@dataclass
class LossConfig:
    """The objective and its penalties."""

    ROOM = "algorithm"

    # The loss of a token and what it is divided by, over the thoughts and over the answers of a minibatch: grpo: mean
    # of each sequence, then of the sequences; bnpo and dapo: of all tokens (here the same: both are of the whole
    # minibatch over all processes); dr_grpo: of sequences taken to have their greatest length; gspo: as grpo, with one
    # ratio per sequence (published with epsilon 3e-4, epsilon_high 4e-4); cispo: as dapo, with a capped ratio as a
    # factor; sapo: as grpo, with a soft gate in place of the clip; gpg: as dapo, without a ratio
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gpg"] = "grpo"
    # Weight of the KL penalty to the reference policy; 0 needs no reference
    beta: Annotated[float, Range(at_least=0, below=math.inf)] = 0.0
    # With d = log(reference / policy): k1: -d; k2: d²/2; k3: exp(d) - d - 1
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # Where the penalty stands: loss, of each token; reward, summed over thought and answer and taken from the reward
    kl_in: Literal["loss", "reward"] = "loss"
    # Multiply the penalty in the loss by the probability ratio, so that its gradient is right after an update too
    use_bias_correction_kl: bool = False
    # The probability ratio is clipped to [1 - epsilon, 1 + epsilon_high]
    epsilon: Annotated[float, Range(at_least=0, at_most=1)] = 0.2
    # Upper clip range; none given: the same as epsilon. With loss_type=cispo the cap of the ratio itself; none: 5
    epsilon_high: Annotated[float | None, Range(at_least=0, below=math.inf)] = None
    # Cap of the ratio where the advantage is negative (two-sided clip), above 1 + epsilon_high; none: no cap
    delta: float | None = None
    # Temperature of the soft gate of loss_type=sapo where the advantage is positive
    sapo_temperature_pos: Annotated[float, Range(above=0, below=math.inf)] = 1.0
    # The same where it is negative
    sapo_temperature_neg: Annotated[float, Range(above=0, below=math.inf)] = 1.05
    # Weight of the answers' term; the thoughts' has weight 1
    answer_weight: Annotated[float, Range(at_least=0, below=math.inf)] = 1.0
    # Leave thoughts and answers that were cut by their length out of the loss; their rewards still are peers of others
    mask_truncated_completions: bool = False
    # Share of the minibatch's tokens, those of highest entropy at their sampling, that the policy term trains; 1: all
    top_entropy_quantile: Annotated[float, Range(above=0, at_most=1)] = 1.0
    # Weight of a bonus for the mean entropy of the policy at the scored tokens
    entropy_coef: Annotated[float, Range(at_least=0, below=math.inf)] = 0.0
    # For rollouts of another engine: weigh each token by the probability that the trained model gives it over that
    # which it was sampled with, at most this; none: rollouts are the trained model's own
    importance_sampling_cap: Annotated[float | None, Range(above=0, below=math.inf)] = None


# ---- the loss of a token, from the ratio π / π_old (of the token or of its sequence), log π and the advantage ----

TokenLoss = Callable[
    [Float[Tensor, " Q"], Float[Tensor, " Q"], Float[Tensor, " Q"], LossConfig],
    Float[Tensor, " Q"],
]


def clipped(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A): PPO (arXiv 1707.06347) and DAPO (2503.14476).

    `delta` caps the ratio, and with it the loss of a token of negative A: the dual clip (arXiv 1912.09729), two-sided
    clip (2505.07291).
    """
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    return -torch.minimum(bounded * advantages, ratio.clamp(*clip_range(config)) * advantages)


def capped(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-min(ratio, cap) * A * log π, with no gradient through the ratio: CISPO (arXiv 2506.13585)."""
    return -(ratio.clamp(*clip_range(config)).detach() * advantages * logprobs)


def soft_gate(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-sigmoid(τ * (ratio - 1)) * 4 / τ * A, with a τ for each sign of A: SAPO (arXiv 2511.20347)."""
    positive, negative = config.sapo_temperature_pos, config.sapo_temperature_neg
    temperature = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    return -(torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages)


def policy_gradient(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """-A * log π: REINFORCE and GPG (arXiv 2504.02546)."""
    return -(advantages * logprobs)


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Lower and upper bound of the ratio; infinite where the objective has no such bound."""
    if config.loss_type == "cispo":
        return -math.inf, CISPO_CAP if config.epsilon_high is None else config.epsilon_high
    if OBJECTIVES[config.loss_type].token_loss is not clipped:
        return -math.inf, math.inf
    return 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)


# ---- what the loss of a token is divided by ----


@dataclass(frozen=True)
class Counts:
    """Counts over the thoughts, or the answers, of the whole minibatch on all processes."""

    prompts: int  # with at least one reward
    tokens: int  # sampled tokens of sequences that are trained
    max_length: int  # number of tokens at which a sequence is truncated


Denominator = Callable[[Bool[Tensor, "*k"], Int[Tensor, "*k"], Counts], Float[Tensor, "*k"]]


def per_sequence(valid: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
    """B * N * T_i: the mean over a sequence's tokens, then over the prompt's N sequences, then over the B prompts."""
    return (counts.prompts * valid.sum().clamp(min=1) * lengths.clamp(min=1)).double()


def per_token(valid: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
    """Σ T: the mean over the minibatch's tokens (DAPO, arXiv 2503.14476)."""
    return torch.full(lengths.shape, max(1, counts.tokens), dtype=torch.float64)


def per_greatest_length(valid: Tensor, lengths: Tensor, counts: Counts) -> Tensor:
    """B * N * L_max: as if every sequence had its greatest length (Dr. GRPO, arXiv 2503.20783)."""
    return (counts.prompts * valid.sum().clamp(min=1) * counts.max_length).expand(lengths.shape).double()


@dataclass(frozen=True)
class Objective:
    """The parts of a loss_type: the loss of a token, and what it is divided by."""

    token_loss: TokenLoss
    denominator: Denominator
    ratio_of: Literal["token", "sequence"] = "token"


OBJECTIVES = {
    "grpo": Objective(clipped, per_sequence),
    "bnpo": Objective(clipped, per_token),
    "dr_grpo": Objective(clipped, per_greatest_length),
    "dapo": Objective(clipped, per_token),
    "gspo": Objective(clipped, per_sequence, ratio_of="sequence"),
    "cispo": Objective(capped, per_token),
    "sapo": Objective(soft_gate, per_sequence),
    "gpg": Objective(policy_gradient, per_token),
}


def sequence_means(values: Float[Tensor, " Q"], sequence: Int[Tensor, " Q"]) -> Float[Tensor, " Q"]:
    """The mean over each token's sequence. `sequence` holds the number of each token's sequence.

    >>> sequence_means(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([7, 3, 7])).tolist()
    [3.0, 2.0, 3.0]
    """
    size = int(sequence.max()) + 1 if len(sequence) else 0
    count = torch.bincount(sequence, minlength=size)
    total = values.new_zeros(size).index_add(0, sequence, values)
    return (total / count.clamp(min=1))[sequence]


# ---- the divergence from the reference, from gap = log π_ref - log π (source: joschu.net/blog/kl-approx) ----


def k1(gap: Tensor) -> Tensor:
    """-gap: unbiased, may be negative."""
    return -gap


def k2(gap: Tensor) -> Tensor:
    """gap² / 2: biased, but its gradient is an unbiased estimate of the divergence's gradient."""
    return gap.square() / 2


def k3(gap: Tensor) -> Tensor:
    """exp(gap) - gap - 1: unbiased, never negative. The gap is clamped from above alone: below, this is linear."""
    gap = gap.clamp(max=MAX_LOG_RATIO)
    return gap.expm1() - gap


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
