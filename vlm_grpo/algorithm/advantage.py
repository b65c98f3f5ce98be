"""Advantages of thoughts and answers from the rewards of one prompt's tree (GRPO-MA, arXiv 2509.24494, and others).

Letters: K thoughts of the prompt (pieces of thoughts, where thoughts branch), M answers of each thought.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.common.options import Range


@dataclass
class AdvantageConfig:
    """How rewards become advantages."""

    ROOM = "algorithm"

    # Of the rewards of answers, and of the thoughts' values (the means of their answers' rewards), x: grpo_ma:
    # (x - mean) / (std + advantage_epsilon), thoughts among thoughts and answers among answers; grpo: so for answers,
    # and a thought has the mean of its answers' advantages; mean: x - mean (Dr. GRPO); rloo: x - mean of the others;
    # reinforce: x; reinforce_pp: x - mean, divided by its standard deviation over the step's prompts; gpg: x - mean,
    # times the step's prompts over those of them whose rewards differ
    advantage: Literal["grpo_ma", "grpo", "mean", "rloo", "reinforce", "reinforce_pp", "gpg"] = "grpo_ma"
    # What one advantage is for: segment, a thought or an answer; sequence, a thought and an answer as one (each of the
    # K*M paths through the tree is a sequence), so that with num_answers=1 a loss_type is the classical algorithm
    credit: Literal["segment", "sequence"] = "segment"
    # Of grpo_ma and grpo. group: divide by the standard deviation of the compared values; none: subtract their mean
    # only
    scale_rewards: Literal["group", "none"] = "group"
    # The standard deviation divides by n - std_ddof. The paper does not say; 1 is what other GRPO trainers use, so
    # num_answers=1 gives their numbers and their learning rates carry over. 0 (population) makes two thoughts +1 and -1
    std_ddof: Annotated[int, Range(at_least=0, at_most=1)] = 1
    # Added to the standard deviation before dividing
    advantage_epsilon: Annotated[float, Range(at_least=0, below=math.inf)] = 1e-4
    # An answer is compared with: prompt, all K*M answers of its prompt (the paper); thought, the M of its own thought;
    # auto: prompt, or with num_levels above 2 thought, so that every segment is compared with its siblings
    answer_baseline: Literal["auto", "prompt", "thought"] = "auto"


@dataclass(frozen=True)
class Advantages:
    """Advantages of one prompt's thoughts and answers, and which of them are valid.

    An answer without a reward (NaN) is not valid: its advantage is 0, and it enters no mean, deviation or count. A
    thought is valid if at least one answer below it has a reward.
    """

    thoughts: Float[Tensor, " K"]
    answers: Float[Tensor, "K M"]
    valid_thoughts: Bool[Tensor, " K"]
    valid_answers: Bool[Tensor, "K M"]
    # All compared values are equal, so every advantage over a baseline is exactly 0. The two flags are independent
    thoughts_zero_std: bool
    answers_zero_std: bool
    stats: "RewardStats"

    @property
    def has_reward(self) -> bool:
        """Whether at least one answer has a reward."""
        return bool(self.valid_answers.any())

    @property
    def has_zero_variance(self) -> bool:
        """Whether neither thoughts nor answers differ: over a baseline, such a prompt has no gradient."""
        return self.thoughts_zero_std and self.answers_zero_std


@dataclass(frozen=True)
class RewardStats:
    """Moments of one prompt's rewards over its n valid answers. Each mean divides by n; it is NaN where n = 0.

    reward_variance = between_thoughts + within_thoughts (law of total variance). With V_i the mean reward of thought i,
    between_thoughts is the mean of (V_i - mean R)^2, and within_thoughts is the mean of (R_ij - V_i)^2.
    """

    reward_mean: float
    reward_variance: float
    between_thoughts: float
    within_thoughts: float


def group_advantages(
    rewards: Float[Tensor, "K M"], config: AdvantageConfig, parents: Sequence[int] | None = None
) -> Advantages:
    """Advantages of K thoughts and K*M answers of one prompt, computed in float64 and returned in the rewards' dtype.

        V_i       = mean_j R_ij
        A(th_i)   = (V_i  - mean_k V_k) / (std_k V_k + epsilon)
        A(ans_ij) = (R_ij - mean R)     / (std R + epsilon)      over all K*M answers, or over the thought's M

    Source: arXiv 2509.24494; for other values of `advantage` see `RULES`. With advantage=grpo or credit=sequence there
    are no V_i: A(th_i) = mean_j A(ans_ij). Deviation: if the compared values are equal up to the rounding of the
    rewards' dtype, the advantages are exactly 0 instead of rounding noise divided by epsilon. Factors that depend on
    all prompts of a step are applied later: see `step_scales`.

    `parents` are needed with num_levels above 2: the index of the thought that each thought continues, or -1 for a
    thought that continues the prompt; a parent comes before its children. A thought that was branched has no answers
    (its row is NaN), and its V is the mean over its children: see `tree_values`. A thought is compared with the other
    children of its parent. Without `parents` all thoughts are siblings.

    >>> a = group_advantages(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), AdvantageConfig(std_ddof=0, advantage_epsilon=0.0))
    >>> a.thoughts.tolist(), [round(x, 3) for x in a.answers.flatten().tolist()]
    ([1.0, -1.0], [0.577, 0.577, 0.577, -1.732])
    """
    assert not rewards.isinf().any(), f"rewards must be finite or NaN, got {rewards.tolist()}"
    valid = ~rewards.isnan()  # (K, M)
    values = rewards.double()
    is_deep = parents is not None
    parents = parents or [-1] * len(values)
    thought_values = tree_values(_mean(values, valid), parents)  # (K,)
    valid_thoughts = ~thought_values.isnan()

    tolerance = 4 * torch.finfo(rewards.dtype).eps
    thoughts, thoughts_flat = _compare_siblings(thought_values, valid_thoughts, parents, tolerance, config)
    if config.answer_baseline == "prompt" or (config.answer_baseline == "auto" and not is_deep):
        flat_answers, answers_flat = compare(values.flatten(), valid.flatten(), tolerance, config)
        answers = flat_answers.view_as(values)
    else:
        answers, answers_flat = compare(values, valid, tolerance, config)
    if config.advantage == "grpo" or config.credit == "sequence":
        shared = _mean(answers, valid).where(valid_thoughts, 0.0)
        thoughts = shared if config.advantage == "reinforce" else shared.masked_fill(thoughts_flat, 0.0)
    return Advantages(
        thoughts=thoughts.to(rewards.dtype),
        answers=answers.to(rewards.dtype),
        valid_thoughts=valid_thoughts,
        valid_answers=valid,
        thoughts_zero_std=bool(thoughts_flat.all()),
        answers_zero_std=bool(answers_flat.all()),
        stats=_reward_stats(values, thought_values, valid),
    )


def tree_values(values: Float[Tensor, " K"], parents: Sequence[int]) -> Float[Tensor, " K"]:
    """The values of all thoughts. `values` holds those of the thoughts that have answers; a branched thought has the
    mean value of its children. NaN means no reward, and enters no mean.

    The mean is over the children and not over the answers below them. Each child is one draw of how the thought
    continues, so the mean over children is an unbiased estimate of the thought's value. A mean over answers would
    weigh a child more if it happened to be branched again.

    >>> tree_values(torch.tensor([torch.nan, 1.0, torch.nan, 0.0, 0.5]), [-1, 0, 0, 2, 2]).tolist()
    [0.625, 1.0, 0.25, 0.0, 0.5]
    """
    found = values.tolist()
    below: list[list[float]] = [[] for _ in parents]
    for i in reversed(range(len(parents))):
        assert parents[i] < i, f"thought {i} comes before its parent {parents[i]}"
        if below[i]:
            found[i] = math.fsum(below[i]) / len(below[i])
        if parents[i] >= 0 and not math.isnan(found[i]):
            below[parents[i]].append(found[i])
    return values.new_tensor(found)


def _compare_siblings(
    values: Tensor, valid: Tensor, parents: Sequence[int], tolerance: float, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """`compare` among the thoughts of each parent: advantages (K,), and whether each parent's children are equal."""
    advantages = torch.zeros_like(values)
    flat = []
    for parent in dict.fromkeys(parents):
        siblings = torch.tensor([i for i, p in enumerate(parents) if p == parent])
        advantages[siblings], is_flat = compare(values[siblings], valid[siblings], tolerance, config)
        flat.append(is_flat)
    return advantages, torch.stack(flat)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid entries of the last axis; NaN where there is none."""
    return values.where(valid, 0.0).sum(dim=-1) / valid.sum(dim=-1)


@dataclass(frozen=True)
class Peers:
    """Values that are compared along the last axis; 0 where a value is not valid."""

    values: Float[Tensor, "*g n"]
    centred: Float[Tensor, "*g n"]  # minus the mean of the valid values; exactly 0 where all are equal
    count: Int[Tensor, "*g 1"]  # of valid values
    is_flat: Bool[Tensor, "*g 1"]  # all valid values are equal


def standardised(peers: Peers, config: AdvantageConfig) -> Tensor:
    """(x - mean) / (std + epsilon): GRPO (arXiv 2402.03300); with scale_rewards=none x - mean."""
    if config.scale_rewards == "none":
        return peers.centred
    squares = peers.centred.square().sum(dim=-1, keepdim=True)
    std = (squares / (peers.count - config.std_ddof).clamp(min=1)).sqrt()
    return peers.centred / (std + config.advantage_epsilon).where(~peers.is_flat, 1.0)


def centred(peers: Peers, config: AdvantageConfig) -> Tensor:
    """x - mean: Dr. GRPO (arXiv 2503.20783)."""
    return peers.centred


def leave_one_out(peers: Peers, config: AdvantageConfig) -> Tensor:
    """x_i - mean_{j≠i} x_j = n / (n - 1) * (x_i - mean): RLOO (arXiv 2402.14740)."""
    return peers.centred * peers.count / (peers.count - 1).clamp(min=1)


def unchanged(peers: Peers, config: AdvantageConfig) -> Tensor:
    """x: REINFORCE without a baseline."""
    return peers.values


RULES: dict[str, Callable[[Peers, AdvantageConfig], Tensor]] = {
    "grpo_ma": standardised,
    "grpo": standardised,
    "mean": centred,
    "rloo": leave_one_out,
    "reinforce": unchanged,
    "reinforce_pp": centred,  # then divided by `step_scales`
    "gpg": centred,  # then multiplied by `step_scales`
}
"""The advantage function of each value of `advantage`."""


def compare(
    values: Float[Tensor, "*g n"], valid: Bool[Tensor, "*g n"], tolerance: float, config: AdvantageConfig
) -> tuple[Float[Tensor, "*g n"], Bool[Tensor, "*g"]]:
    """Advantages along the last axis among the valid values, and which groups hold equal values only.

    `tolerance`: values that differ by less than this share of the largest are equal.
    """
    count = valid.sum(dim=-1, keepdim=True)
    size = values.where(valid, 0.0).abs().amax(dim=-1, keepdim=True)
    highest = values.where(valid, -torch.inf).amax(dim=-1, keepdim=True)
    lowest = values.where(valid, torch.inf).amin(dim=-1, keepdim=True)
    flat = highest - lowest <= tolerance * size  # true where no value is valid: -inf - inf <= 0
    differences = (values - _mean(values, valid).unsqueeze(-1)).where(valid & ~flat, 0.0)
    peers = Peers(values.where(valid, 0.0), differences, count, flat)
    return RULES[config.advantage](peers, config), flat.squeeze(-1)


@dataclass(frozen=True)
class GroupFacts:
    """The numbers of one prompt that `step_scales` needs; small enough to send to every process."""

    has_reward: bool
    has_zero_variance: bool
    thoughts: tuple[int, float]  # number of valid thoughts, sum of their squared advantages
    answers: tuple[int, float]


def group_facts(advantages: Advantages) -> GroupFacts:
    """The facts of one prompt whose advantages are not scaled yet."""

    def squares(values: Tensor, valid: Tensor) -> tuple[int, float]:
        return int(valid.sum()), float(values.double().square().sum())

    return GroupFacts(
        advantages.has_reward,
        advantages.has_zero_variance,
        squares(advantages.thoughts, advantages.valid_thoughts),
        squares(advantages.answers, advantages.valid_answers),
    )


def step_scales(facts: Iterable[GroupFacts], config: AdvantageConfig) -> tuple[float, float]:
    """Factors of the thoughts' and the answers' advantages, from all prompts of the step over all processes.

        reinforce_pp: 1 / (std + epsilon) of all values minus their prompt's mean
        gpg:          prompts / prompts whose rewards differ

    Sources: REINFORCE++-baseline, arXiv 2501.03262; GPG, arXiv 2504.02546. Deviation: the published REINFORCE++ takes
    its standard deviation over tokens, this one over sequences. With credit=sequence only the answers' values count.
    """
    graded = [f for f in facts if f.has_reward]
    if config.advantage == "gpg":
        scale = len(graded) / max(1, sum(not f.has_zero_variance for f in graded))
        return scale, scale
    if config.advantage != "reinforce_pp":
        return 1.0, 1.0

    def scale_of(moments: Sequence[tuple[int, float]]) -> float:
        count, squares = sum(n for n, _ in moments), math.fsum(s for _, s in moments)  # exact in any order
        std = math.sqrt(squares / max(1, count - config.std_ddof))
        return 1.0 / (std + config.advantage_epsilon) if std > 0 else 1.0

    answers = scale_of([f.answers for f in graded])
    return (answers if config.credit == "sequence" else scale_of([f.thoughts for f in graded])), answers


def scaled(advantages: Advantages, scales: tuple[float, float]) -> Advantages:
    """The advantages with those of thoughts multiplied by scales[0] and those of answers by scales[1]."""
    return replace(advantages, thoughts=advantages.thoughts * scales[0], answers=advantages.answers * scales[1])


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
