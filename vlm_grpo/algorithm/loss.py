"""The loss of a minibatch from per-token tensors: the weights hold every denominator, the loss is a weighted sum.

GRPO-MA (arXiv 2509.24494) is the default; objectives.py has the others. Letters: K thoughts of a prompt, M answers of a
thought, Q sampled tokens in any order, from any trees.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.algorithm.advantage import Advantages
from vlm_grpo.algorithm.objectives import (
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    OBJECTIVES,
    Counts,
    LossConfig,
    clip_range,
    sequence_means,
)


@dataclass(frozen=True)
class Minibatch:
    """Counts of the whole minibatch, for the denominators."""

    thoughts: Counts
    answers: Counts


@dataclass(frozen=True)
class TokenWeights:
    """The weight of each single token of a thought or answer; it includes every denominator of the objective."""

    thoughts: Float[Tensor, " K"]
    answers: Float[Tensor, "K M"]


def token_weights(
    advantages: Advantages,
    thought_lengths: Int[Tensor, " K"],
    answer_lengths: Int[Tensor, "K M"],
    minibatch: Minibatch,
    config: LossConfig,
) -> TokenWeights:
    """Weights of the tokens of one prompt's tree, such that loss = sum_q weight_q * loss_q. With loss_type=grpo:

        thought i:    1 / B * 1 / K * 1 / |th_i|
        answer i, j:  1 / B * answer_weight / (K*M) * 1 / |ans_ij|

    B is the minibatch's number of prompts; K and K*M count the valid thoughts and answers, and the others weigh 0.
    Lengths count sampled tokens, without the forced bridge. A sequence that is not trained has length 0: it weighs
    nothing, but still counts in K or K*M. With credit=sequence the lengths of thoughts are 0, and the length of an
    answer is that of its whole path.
    """
    assert minibatch.answers.prompts >= 1, f"{minibatch}: a minibatch without any reward has no loss"
    denominator = OBJECTIVES[config.loss_type].denominator

    def weights(valid: Tensor, lengths: Tensor, counts: Counts, scale: float) -> Tensor:
        return (scale / denominator(valid, lengths, counts)).where(valid & (lengths > 0), 0.0).float()

    return TokenWeights(
        thoughts=weights(advantages.valid_thoughts, thought_lengths, minibatch.thoughts, 1.0),
        answers=weights(advantages.valid_answers, answer_lengths, minibatch.answers, config.answer_weight),
    )


@dataclass(frozen=True)
class PolicyLoss:
    """The share that some tokens have in a minibatch's loss: shares add up to the loss, and so do their gradients.

    `sums` are over tokens of non-zero weight; add them over micro-batches and processes for `loss_metrics`.
    """

    loss: Float[Tensor, ""]
    sums: dict[str, Float[Tensor, ""]]


SUMS = ("tokens", "ratios", "kl", "ratio", "clipped_low", "clipped_high")
"""Names of the sums. `ratios` counts the probability ratios: one for each token, or one for each sequence."""


def policy_loss(
    logprobs: Float[Tensor, " Q"],
    old_logprobs: Float[Tensor, " Q"],
    ref_logprobs: Float[Tensor, " Q"] | None,
    advantages: Float[Tensor, " Q"],
    weights: Float[Tensor, " Q"],
    config: LossConfig,
    *,
    sequence: Int[Tensor, " Q"] | None = None,
    factors: Float[Tensor, " Q"] | None = None,
    entropies: Float[Tensor, " Q"] | None = None,
    num_entropies: int = 1,
) -> PolicyLoss:
    """The weighted sum of the tokens' losses. The only denominators are those in `weights`.

        ratio  = exp(logprobs - old_logprobs), or exp of its mean over the sequence (loss_type=gspo)
        loss_q = factor * token_loss(ratio, A) + beta * kl,      see OBJECTIVES and KL_ESTIMATORS; by default
        loss_q = -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) + beta * (exp(d) - d - 1)
        d      = ref_logprobs - logprobs
        loss   = sum_q weight_q * loss_q - entropy_coef / num_entropies * sum_q entropy_q

    Source: arXiv 2509.24494. Deviation: log-ratios are clamped before exp: that of `ratio` to ±MAX_LOG_RATIO, d from
    above only (its linear branch needs no bound and keeps pulling the policy back). Gradients flow through `logprobs`
    and `entropies` alone. `ref_logprobs` are required if the loss has a KL penalty (beta > 0); without a penalty they
    only serve the metric `kl`. On policy the loss is -sum_q weight_q * A_q, which is 0 up to rounding because
    advantages sum to 0; this says nothing about progress.

    `sequence` numbers the sequence of each token; all tokens of a sequence must be given. `factors` multiply the
    policy's term; a factor of 0 also removes the token from the entropy bonus, which is a mean over `num_entropies`
    tokens of the whole minibatch.
    """
    assert logprobs.dtype in (torch.float32, torch.float64), f"log-probabilities need float32, got {logprobs.dtype}"
    in_loss = config.beta > 0 and config.kl_in == "loss"
    assert not in_loss or ref_logprobs is not None, f"beta is {config.beta}, but there are no ref_logprobs"
    objective = OBJECTIVES[config.loss_type]
    counted = (weights > 0).to(logprobs.dtype)
    share = counted  # the share of each token in its ratio

    log_ratio = logprobs - old_logprobs.detach()
    if objective.ratio_of == "sequence":
        assert sequence is not None, f"loss_type={config.loss_type} needs to know the sequences"
        log_ratio = sequence_means(log_ratio, sequence)
        share = counted / torch.bincount(sequence)[sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    token_loss = objective.token_loss(ratio, logprobs, advantages, config)
    if factors is not None:
        token_loss = token_loss * factors
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = KL_ESTIMATORS[config.kl_estimator](ref_logprobs.detach() - logprobs)
        kl = kl * ratio if config.use_bias_correction_kl else kl
    if in_loss:
        token_loss = token_loss + config.beta * kl
    loss = (weights * token_loss).sum()
    if config.entropy_coef > 0:
        assert entropies is not None, f"entropy_coef is {config.entropy_coef}, but there are no entropies"
        active = counted if factors is None else counted * (factors > 0)
        loss = loss - config.entropy_coef / num_entropies * (entropies * active).sum()

    low, high = clip_range(config)
    sums = {
        "tokens": counted,
        "ratios": share,
        "kl": kl.detach() * counted,
        "ratio": ratio.detach() * share,
        "clipped_low": (ratio < low) * (advantages < 0) * share,
        "clipped_high": (ratio > high) * (advantages > 0) * share,
    }
    return PolicyLoss(loss=loss, sums={name: value.sum() for name, value in sums.items()})


def loss_metrics(sums: Mapping[str, float], config: LossConfig) -> dict[str, float]:
    """Metrics from a minibatch's sums: `kl` is a mean over tokens, the others are means over ratios (one for each
    token, with loss_type=gspo one for each sequence). They are 0 without tokens. An objective without a clip has no
    clip ratio.
    """
    tokens, ratios = max(sums["tokens"], 1), max(sums["ratios"], 1)
    metrics = {"kl": sums["kl"] / tokens, "ratio": sums["ratio"] / ratios}
    low, high = (sums[name] / ratios for name in ("clipped_low", "clipped_high"))
    if config.loss_type == "cispo":
        return metrics | {"cispo_clip_ratio": high}
    if clip_range(config)[1] < float("inf"):
        return metrics | {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
    return metrics
