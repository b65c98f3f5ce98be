"""Rewards and tokens that are weighed: overlong penalty, divergence in the reward, top entropies, another engine's."""

import math

import pytest
import torch
from support.steps import hand_made_tree

from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.objectives import LossConfig
from vlm_grpo.algorithm.shaping import (
    entropy_threshold,
    importance_weights,
    path_divergence,
    path_lengths,
    segment_lengths,
    soft_overlong,
)
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.config import layered_config
from vlm_grpo.common.errors import UserError


def test_the_soft_penalty_is_that_of_dapo():
    for maximum, cache in ((10, 4), (7, 7), (20480, 4096)):
        lengths = torch.arange(0, maximum + 5, max(1, maximum // 50))
        for length, found in zip(lengths.tolist(), soft_overlong(lengths, maximum, cache).tolist(), strict=True):
            if length <= maximum - cache:
                expected = 0.0
            elif length <= maximum:
                expected = ((maximum - cache) - length) / cache
            else:
                expected = -1.0
            assert found == pytest.approx(expected, abs=1e-6)


def test_lengths_of_paths_are_of_a_thought_and_its_answer():
    tree = hand_made_tree([(4, (1, 2)), (8, (3, 5))], set())
    assert path_lengths(tree).tolist() == [[5, 6], [11, 13]]
    assert segment_lengths(tree) == [4, 1, 2, 8, 3, 5]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_of_a_path_is_the_sum_over_its_tokens(estimator):
    tree = hand_made_tree([(2, (1, 2)), (1, (1, 1))], set())  # sampled with log-probabilities 0
    ref = -torch.arange(1, 9, dtype=torch.float64) / 10  # of thought 0, its answers, thought 1, its answers
    divergence, total = path_divergence(tree, ref, LossConfig(kl_estimator=estimator))

    def k(*tokens):
        gaps = [-token / 10 for token in tokens]
        each = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - d - 1}[estimator]
        return sum(map(each, gaps))

    expected = [[k(1, 2, 3), k(1, 2, 4, 5)], [k(6, 7), k(6, 8)]]
    assert divergence.tolist() == [pytest.approx(row) for row in expected]
    assert total == pytest.approx(k(*range(1, 9)))


def test_the_threshold_keeps_the_wanted_share_of_tokens():
    entropies = torch.rand(1000, generator=torch.Generator().manual_seed(0)).tolist()
    for quantile in (0.001, 0.2, 0.5, 0.9, 1.0):
        least = entropy_threshold(entropies, quantile)
        kept = sum(e >= least for e in entropies)
        assert abs(kept - quantile * 1000) <= 1
        theirs = torch.quantile(torch.tensor(entropies, dtype=torch.float64), 1 - quantile)
        assert least == pytest.approx(float(theirs), abs=1e-12)
    assert entropy_threshold([], 0.2) == -math.inf
    assert [e >= entropy_threshold([0.5] * 3, 0.2) for e in [0.5] * 3] == [True] * 3


def test_importance_weights_are_capped_ratios_without_a_gradient():
    train = torch.tensor([-1.0, -1.0, -1.0, -100.0], requires_grad=True)
    rollout = torch.tensor([-1.5, -0.5, -9.0, 0.0])
    weights = importance_weights(train, rollout, cap=2.0)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5), 2.0, math.exp(-20)])
    same = importance_weights(rollout, rollout, cap=1.0)
    assert same.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("options", "advantage", "named"),
    [
        ({"soft_punish_cache": 0}, "grpo_ma", "soft_punish_cache=0"),
        ({"soft_punish_cache": 41}, "grpo_ma", r"soft_punish_cache=41: .* = 40"),
        ({"max_resamples": 0}, "grpo_ma", "max_resamples=0"),
        ({"max_resamples": 2}, "grpo_ma", "max_resamples=2 does nothing with dynamic_sampling=none"),
        ({"dynamic_sampling": "drop"}, "reinforce", "dynamic_sampling=drop with advantage=reinforce"),
        ({"dynamic_sampling": "resample"}, "reinforce", "dynamic_sampling=resample with advantage=reinforce"),
        ({"dynamic_sampling": "drop"}, "gpg", "dynamic_sampling=drop with advantage=gpg"),
    ],
)
def test_options_without_meaning_are_refused_with_the_reason(options, advantage, named):
    with pytest.raises(UserError, match=named):
        check(layered_config(StepConfig, None, [({"advantage": advantage, **options}, "here")]))
    check(StepConfig(soft_punish_cache=40, dynamic_sampling="resample", advantage="gpg"))
