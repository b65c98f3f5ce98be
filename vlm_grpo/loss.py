"""The objective of GRPO-MA (arXiv 2509.24494) as pure functions of per-token tensors.

Letters: K thoughts of a prompt, M answers of a thought, Q scored tokens in any order, from any trees.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.advantage import Advantages
from vlm_grpo.errors import UserError

# exp() of more than this says only that the policies have parted: it stays finite in float32, also when squared.
MAX_LOG_RATIO = 20.0


@dataclass
class LossConfig:
    """The clipped objective and its penalty."""

    # Weight of the KL penalty to the reference policy; 0 needs no reference
    beta: float = 0.0
    # The probability ratio is clipped to [1 - epsilon, 1 + epsilon_high]
    epsilon: float = 0.2
    # Upper clip range; none given: the same as epsilon
    epsilon_high: float | None = None
    # Weight of the answers' term; the thoughts' has weight 1
    answer_weight: float = 1.0


def check_loss_options(config: LossConfig) -> None:
    """Raise UserError for values the objective is not defined for."""
    if not 0 <= config.epsilon <= 1:
        raise UserError(f"epsilon={config.epsilon}: must be from 0 to 1")
    for name in ("beta", "epsilon_high", "answer_weight"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{name}={value}: must be a finite number of at least 0")


@dataclass(frozen=True)
class TokenWeights:
    """The weight of each single token of a thought and of an answer: it holds every denominator of the objective."""

    thoughts: Float[Tensor, " K"]
    answers: Float[Tensor, "K M"]


def token_weights(
    advantages: Advantages,
    thought_lengths: Int[Tensor, " K"],
    answer_lengths: Int[Tensor, "K M"],
    num_prompts: int,
    config: LossConfig,
) -> TokenWeights:
    """Weights of the tokens of one prompt's tree, such that loss = sum_q weight_q * loss_q.

        thought i:    1 / B * 1 / K * 1 / |th_i|
        answer i, j:  1 / B * answer_weight / (K*M) * 1 / |ans_ij|

    B is `num_prompts`: prompts with at least one reward in the whole minibatch, over all processes and micro-batches.
    K and K*M count the valid thoughts and answers; others weigh 0. Lengths are in scored tokens: a forced bridge is
    not counted.
    """
    assert num_prompts >= 1, f"num_prompts is {num_prompts}, but a minibatch without any reward has no loss"

    def weights(valid: Tensor, lengths: Tensor, scale: float) -> Tensor:
        denominator = num_prompts * valid.sum().clamp(min=1) * lengths.clamp(min=1)
        return (scale / denominator.double()).where(valid & (lengths > 0), 0.0).float()

    return TokenWeights(
        thoughts=weights(advantages.valid_thoughts, thought_lengths, 1.0),
        answers=weights(advantages.valid_answers, answer_lengths, config.answer_weight),
    )


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is this part's share of the minibatch's loss: shares add up, and so do their gradients.

    `sums` are sums over tokens of non-zero weight, to be added over micro-batches and processes: see `loss_metrics`.
    """

    loss: Float[Tensor, ""]
    sums: dict[str, Float[Tensor, ""]]


def policy_loss(
    logprobs: Float[Tensor, " Q"],
    old_logprobs: Float[Tensor, " Q"],
    ref_logprobs: Float[Tensor, " Q"] | None,
    advantages: Float[Tensor, " Q"],
    weights: Float[Tensor, " Q"],
    config: LossConfig,
) -> PolicyLoss:
    """The weighted sum of the tokens' losses; the only denominators are those in `weights`.

        ratio  = exp(logprobs - old_logprobs)
        loss_q = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) + beta * k3
        k3     = exp(d) - d - 1,   d = ref_logprobs - logprobs

    Source: arXiv 2509.24494. Deviation: log-ratios are clamped before exp, the first to ±MAX_LOG_RATIO, d from above
    only (its linear branch needs no bound and keeps pulling the policy back). Gradients flow through `logprobs` alone.
    `ref_logprobs` is needed if beta > 0; given with beta = 0 it is only measured. On policy the value is
    -sum_q weight_q * A_q, which is 0 up to rounding because advantages sum to 0, whatever is learnt.
    """
    assert logprobs.dtype in (torch.float32, torch.float64), f"log-probabilities need float32, got {logprobs.dtype}"
    assert config.beta == 0 or ref_logprobs is not None, f"beta is {config.beta}, but there are no ref_logprobs"
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    log_ratio = logprobs - old_logprobs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - config.epsilon, 1 + high)
    token_loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        gap = (ref_logprobs.detach() - logprobs).clamp(max=MAX_LOG_RATIO)
        kl = gap.expm1() - gap
    if config.beta > 0:
        token_loss = token_loss + config.beta * kl

    counted = (weights > 0).to(logprobs.dtype)
    sums = {
        "tokens": counted,
        "kl": kl.detach() * counted,
        "ratio": ratio.detach() * counted,
        "clipped_low": (ratio < 1 - config.epsilon) * (advantages < 0) * counted,
        "clipped_high": (ratio > 1 + high) * (advantages > 0) * counted,
    }
    return PolicyLoss(loss=(weights * token_loss).sum(), sums={name: value.sum() for name, value in sums.items()})


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means per scored token, under the names that are logged, of the minibatch's sums (zeros for no token)."""
    tokens = max(sums["tokens"], 1)
    return {
        "kl": sums["kl"] / tokens,
        "ratio": sums["ratio"] / tokens,
        "clip_ratio/low_mean": sums["clipped_low"] / tokens,
        "clip_ratio/high_mean": sums["clipped_high"] / tokens,
    }
