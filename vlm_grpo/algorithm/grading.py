"""From scored trees to what the update needs of each: rewards as they are compared, advantages, the tokens' factors.

Letters: K thoughts, M answers, Q scored tokens of one tree in its order.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.algorithm.advantage import group_advantages, group_facts, scaled, step_scales
from vlm_grpo.algorithm.minibatch import Graded, ObjectiveConfig, Penalties
from vlm_grpo.algorithm.shaping import importance_weights, path_divergence, path_lengths, soft_overlong, tree_logprobs
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.features import Features, join_features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.tree.pack import fill_rows, pack, packed_length, tree_segments
from vlm_grpo.tree.types import RolloutTree


def grade(
    vlm: VLM,
    scored: Sequence[ScoredTree],
    features: Sequence[Features | None],
    places: Sequence[int],
    config: ObjectiveConfig,
    max_tokens: int,
) -> list[Graded]:
    """The trees with their advantages among themselves; rows of at most `max_tokens` where they are scored again."""
    trees = [s.tree for s in scored]
    penalties = [Penalties() for _ in scored]
    rewards = [s.values for s in scored]
    if config.soft_punish_cache is not None:
        longest = config.max_thought_length + config.max_answer_length
        for i, tree in enumerate(trees):
            overlong = soft_overlong(path_lengths(tree), longest, config.soft_punish_cache)
            rewards[i] = rewards[i] + overlong
            overlong = overlong.where(torch.tensor(tree.by_answer(lambda _: True, none=False)), 0.0)
            penalties[i] = replace(penalties[i], overlong=float(overlong.sum()))
    if config.kl_in == "reward":
        for i, ref_logprobs in enumerate(score_again(vlm, trees, features, max_tokens, by_reference=True)):
            divergence, total = path_divergence(trees[i], ref_logprobs, config)
            rewards[i] = rewards[i] - (config.beta * divergence).float()
            penalties[i] = replace(penalties[i], kl=total)
    rescored: list[tuple[Tensor, Tensor] | None] = [None] * len(trees)
    if config.importance_sampling_cap is not None:
        for i, logprobs in enumerate(score_again(vlm, trees, features, max_tokens)):
            weights = importance_weights(logprobs, tree_logprobs(trees[i]), config.importance_sampling_cap)
            rescored[i] = (logprobs, weights)
    advantages = [
        group_advantages(values, config, [t.parent for t in tree.thoughts] if config.num_levels > 2 else None)
        for values, tree in zip(rewards, trees, strict=True)
    ]
    return [
        Graded(scored[i], advantages[i], features[i], places[i], rescored[i], penalties[i]) for i in range(len(scored))
    ]


@torch.no_grad()
def score_again(
    vlm: VLM,
    trees: Sequence[RolloutTree],
    features: Sequence[Features | None],
    max_tokens: int,
    by_reference: bool = False,
) -> list[Float[Tensor, " _"]]:
    """Log-probabilities of each tree's tokens by the model as it is, or by the reference, as an update sees them."""
    segments = [tree_segments(tree) for tree in trees]
    found: dict[int, Tensor] = {}
    for row in map(sorted, fill_rows([packed_length(of_tree) for of_tree in segments], max_tokens)):
        packed = pack([segments[i] for i in row]).to(vlm.device)
        if by_reference:
            with vlm.as_reference():
                seen = vlm.encode([trees[i].prompt for i in row]) if vlm.tower_trains else [features[i] for i in row]
                values = vlm.logprobs(packed, join_features(seen))
        else:
            values = vlm.logprobs(packed, join_features([features[i] for i in row]))
        lengths = [sum(s.num_scored for s in segments[i]) for i in row]
        found |= zip(row, values.cpu().split(lengths), strict=True)
    return [found[i] for i in range(len(trees))]


def scale_step(graded: Sequence[Graded], config: ObjectiveConfig, processes: Processes) -> list[Graded]:
    """With advantages that are relative to the whole step, where `advantage` asks for that."""
    if config.advantage not in ("reinforce_pp", "gpg"):
        return list(graded)
    scales = step_scales(processes.gather([group_facts(g.advantages) for g in graded]), config)
    return [replace(g, advantages=scaled(g.advantages, scales)) for g in graded]


def penalty_metrics(graded: Sequence[Graded], config: ObjectiveConfig, processes: Processes) -> dict[str, float]:
    """What was taken from the rewards: `overlong_penalty`, mean over answers, and `kl`, mean over tokens. The metric
    `reward` is before penalties, those of its variance are after.
    """
    if config.soft_punish_cache is None and config.kl_in != "reward":
        return {}
    own = [0.0, 0.0, 0.0, 0.0]
    for g in graded:
        tree = g.scored.tree
        own[0] += g.penalties.overlong
        own[1] += tree.num_answers
        own[2] += g.penalties.kl
        own[3] += tree.num_sampled
    overlong, answers, kl, tokens = (sum(column) for column in zip(*processes.gather([own]), strict=True))
    metrics = {} if config.soft_punish_cache is None else {"overlong_penalty": overlong / max(1.0, answers)}
    return metrics | ({"kl": kl / max(1.0, tokens)} if config.kl_in == "reward" else {})
