"""Rewards of one prompt's tree to advantages of its thoughts and answers (GRPO-MA, arXiv 2509.24494).

Letters: K thoughts of the prompt, M answers of each thought.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vlm_grpo.errors import UserError


@dataclass
class AdvantageConfig:
    """How rewards become advantages."""

    # group: divide by the standard deviation of the compared values; none: subtract their mean only (Dr. GRPO)
    scale_rewards: Literal["group", "none"] = "group"
    # The standard deviation divides by n - std_ddof. The paper does not say; 1 is what other GRPO trainers use, so
    # num_answers=1 gives their numbers and their learning rates carry over. 0 (population) makes two thoughts +1 and -1
    std_ddof: int = 1
    # Added to the standard deviation before dividing
    advantage_epsilon: float = 1e-4
    # An answer is compared with: prompt, all K*M answers of its prompt (the paper); thought, the M of its own thought
    answer_baseline: Literal["prompt", "thought"] = "prompt"


def check_advantage_options(config: AdvantageConfig, num_answers: int) -> None:
    """Raise UserError for values that cannot be used or would silently teach nothing."""
    if config.std_ddof not in (0, 1):
        raise UserError(f"std_ddof={config.std_ddof}: must be 0 (population) or 1 (sample)")
    if not 0 <= config.advantage_epsilon < float("inf"):
        raise UserError(f"advantage_epsilon={config.advantage_epsilon}: must be a finite number of at least 0")
    if config.answer_baseline == "thought" and num_answers == 1:
        raise UserError(
            "answer_baseline=thought with num_answers=1 compares every answer with itself and trains none: "
            "use answer_baseline=prompt or num_answers=2 or more"
        )


@dataclass(frozen=True)
class Advantages:
    """What the rewards of one prompt say about its thoughts and answers.

    An answer without a reward (NaN) is not valid: its advantage is 0, and it enters no mean, deviation or count. A
    thought none of whose answers has a reward is not valid either.
    """

    thoughts: Float[Tensor, " K"]
    answers: Float[Tensor, "K M"]
    valid_thoughts: Bool[Tensor, " K"]
    valid_answers: Bool[Tensor, "K M"]
    # All values compared are equal, so every advantage is exactly 0; the two are independent of each other
    thoughts_zero_std: bool
    answers_zero_std: bool
    stats: "RewardStats"


@dataclass(frozen=True)
class RewardStats:
    """Moments of the rewards of one prompt over its n valid answers (all divided by n; NaN where n = 0).

    reward_variance = between_thoughts + within_thoughts (law of total variance): with V_i a thought's mean reward, the
    mean of (V_i - mean R)^2 and the mean of (R_ij - V_i)^2.
    """

    reward_mean: float
    reward_variance: float
    between_thoughts: float
    within_thoughts: float


def group_advantages(rewards: Float[Tensor, "K M"], config: AdvantageConfig) -> Advantages:
    """Advantages of K thoughts and K*M answers of one prompt; the arithmetic is float64, the result has rewards' dtype.

        V_i       = mean_j R_ij
        A(th_i)   = (V_i  - mean_k V_k) / (std_k V_k + epsilon)
        A(ans_ij) = (R_ij - mean R)     / (std R + epsilon)      over all K*M answers, or over the thought's M

    Source: arXiv 2509.24494. Deviation: if the compared values are equal up to the rounding of rewards' dtype, the
    advantages are exactly 0 instead of rounding noise divided by epsilon.

    >>> a = group_advantages(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), AdvantageConfig(std_ddof=0, advantage_epsilon=0.0))
    >>> a.thoughts.tolist(), [round(x, 3) for x in a.answers.flatten().tolist()]
    ([1.0, -1.0], [0.577, 0.577, 0.577, -1.732])
    """
    assert not rewards.isinf().any(), f"rewards must be finite or NaN, got {rewards.tolist()}"
    valid = ~rewards.isnan()  # (K, M)
    values = rewards.double()
    thought_values = _mean(values, valid)  # (K,)
    valid_thoughts = valid.any(dim=-1)

    tolerance = 4 * torch.finfo(rewards.dtype).eps
    thoughts, thoughts_flat = _standardise(thought_values, valid_thoughts, tolerance, config)
    if config.answer_baseline == "prompt":
        flat_answers, answers_flat = _standardise(values.flatten(), valid.flatten(), tolerance, config)
        answers = flat_answers.view_as(values)
    else:
        answers, answers_flat = _standardise(values, valid, tolerance, config)
    return Advantages(
        thoughts=thoughts.to(rewards.dtype),
        answers=answers.to(rewards.dtype),
        valid_thoughts=valid_thoughts,
        valid_answers=valid,
        thoughts_zero_std=bool(thoughts_flat.all()),
        answers_zero_std=bool(answers_flat.all()),
        stats=_reward_stats(values, thought_values, valid),
    )


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid entries of the last axis; NaN where there is none."""
    return values.where(valid, 0.0).sum(dim=-1) / valid.sum(dim=-1)


def _standardise(values: Tensor, valid: Tensor, tolerance: float, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Values standardised along the last axis among the valid ones, and which groups (…,) hold nothing to compare."""
    count = valid.sum(dim=-1, keepdim=True)
    centred = (values - _mean(values, valid).unsqueeze(-1)).where(valid, 0.0)
    size = values.where(valid, 0.0).abs().amax(dim=-1, keepdim=True)
    highest = values.where(valid, -torch.inf).amax(dim=-1, keepdim=True)
    lowest = values.where(valid, torch.inf).amin(dim=-1, keepdim=True)
    flat = highest - lowest <= tolerance * size  # true where no value is valid: -inf - inf <= 0
    if config.scale_rewards == "group":
        std = (centred.square().sum(dim=-1, keepdim=True) / (count - config.std_ddof).clamp(min=1)).sqrt()
        centred = centred / (std + config.advantage_epsilon).where(~flat, 1.0)
    return centred.masked_fill(flat, 0.0), flat.squeeze(-1)


def _reward_stats(values: Tensor, thought_values: Tensor, valid: Tensor) -> RewardStats:
    def mean(x: Tensor) -> float:
        return _mean(x.flatten(), valid.flatten()).item()

    reward_mean = mean(values)
    of_thought = thought_values.unsqueeze(-1).expand_as(values)  # (K, M)
    return RewardStats(
        reward_mean=reward_mean,
        reward_variance=mean((values - reward_mean).square()),
        between_thoughts=mean((of_thought - reward_mean).square()),
        within_thoughts=mean((values - of_thought).square()),
    )
