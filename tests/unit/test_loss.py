""""""

import math

import pytest
import torch
from support.losses import NAN, minibatch_of, random_prompts, tokens

from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages
from vlm_grpo.algorithm.loss import Minibatch, loss_metrics, policy_loss, token_weights
from vlm_grpo.algorithm.objectives import Counts, LossConfig


def only(prompts):
    """A minibatch in which nothing but the number of prompts counts."""
    return Minibatch(Counts(prompts, 0, 0), Counts(prompts, 0, 0))


def scored_tokens(prompts, config):
    """(advantages, weights) per token, as a packed row would hold them: prompt, thought, its answers."""
    advantages, weights = [], []
    for rewards, thought_lengths, answer_lengths in prompts:
        group = group_advantages(rewards, AdvantageConfig())
        weight = token_weights(group, thought_lengths, answer_lengths, minibatch_of(prompts), config)
        for i, length in enumerate(thought_lengths.tolist()):
            advantages += [group.thoughts[i]] * length
            weights += [weight.thoughts[i]] * length
            for j, answer_length in enumerate(answer_lengths[i].tolist()):
                advantages += [group.answers[i, j]] * answer_length
                weights += [weight.answers[i, j]] * answer_length
    return torch.stack(advantages), torch.stack(weights)


def slow_objective(prompts, new, old, ref, config):
    """J of arXiv 2509.24494 from its formulas: (1/B) sum_prompts [(1/K) sum_i J(th_i) + (w/KM) sum_ij J(ans_ij)]."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    position = 0

    def j_clip(length, advantage):
        nonlocal position
        total = 0.0
        for _ in range(length):
            ratio = torch.exp(new[position] - old[position])
            clipped = min(max(ratio, 1 - config.epsilon), 1 + high)
            k3 = torch.exp(ref[position] - new[position]) - (ref[position] - new[position]) - 1
            total = total + min(ratio * advantage, clipped * advantage) - config.beta * k3
            position += 1
        return total / length if length else 0.0

    objective = 0.0
    for rewards, thought_lengths, answer_lengths in prompts:
        group = group_advantages(rewards, AdvantageConfig())
        thought_terms, answer_terms = [], []
        for i, length in enumerate(thought_lengths.tolist()):
            term = j_clip(length, group.thoughts[i])
            if any(not math.isnan(r) for r in rewards[i].tolist()):
                thought_terms.append(term)
            for j, answer_length in enumerate(answer_lengths[i].tolist()):
                term = j_clip(answer_length, group.answers[i, j])
                if not math.isnan(rewards[i, j].item()):
                    answer_terms.append(term)
        objective = objective + sum(thought_terms) / len(thought_terms)
        objective = objective + config.answer_weight * sum(answer_terms) / len(answer_terms)
    return objective / len(prompts)


def test_clipping_by_hand():
    # ratio, advantage: min(ratio * A, clip(ratio) * A) with clip to [0.8, 1.28]; gradient -ratio * A unless clipped
    ratio = tokens(1.5, 1.5, 0.5, 0.5, 1.0)
    advantages = tokens(2.0, -1.0, 1.0, -1.0, 3.0)
    new = ratio.log().requires_grad_()
    weights = tokens(1.0, 10.0, 100.0, 1000.0, 0.5)
    result = policy_loss(new, tokens(0, 0, 0, 0, 0), None, advantages, weights, LossConfig(epsilon_high=0.28))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-2.56 + 10 * 1.5 + 100 * -0.5 + 1000 * 0.8 - 0.5 * 3.0)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 15.0, -50.0, 0.0, -1.5])
    assert loss_metrics({name: value.item() for name, value in result.sums.items()}, LossConfig()) == pytest.approx(
        {"kl": 0.0, "ratio": 1.0, "clip_ratio/low_mean": 0.2, "clip_ratio/high_mean": 0.2}
    )


def test_epsilon_high_is_epsilon_where_none_is_given():
    new, old = tokens(math.log(2.0)), tokens(0.0)
    for config, expected in [(LossConfig(epsilon=0.1), -1.1), (LossConfig(epsilon=0.1, epsilon_high=0.5), -1.5)]:
        assert policy_loss(new, old, None, tokens(1.0), tokens(1.0), config).loss.item() == pytest.approx(expected)


def test_kl_by_hand():
    # d = ln 2: k3 = 2 - ln 2 - 1, its gradient 1 - exp(d) = -1; on policy the clipped term gives -A * ratio = 0 here
    new = tokens(-1.0).requires_grad_()
    ref = tokens(-1.0 + math.log(2.0))
    result = policy_loss(new, new.detach(), ref, tokens(0.0), tokens(0.5), LossConfig(beta=0.1))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5 * 0.1 * (1 - math.log(2.0)))
    assert result.sums["kl"].item() == pytest.approx(1 - math.log(2.0))
    assert new.grad is not None and new.grad.item() == pytest.approx(-0.05)


def test_a_reference_is_measured_but_not_trained_on_at_beta_zero():
    new = tokens(-1.0).requires_grad_()
    result = policy_loss(new, new.detach(), tokens(-2.0), tokens(0.0), tokens(1.0), LossConfig())
    assert result.loss.item() == 0.0
    assert result.sums["kl"].item() == pytest.approx(math.exp(-1.0))  # d = -1: exp(-1) + 1 - 1


def test_weights_hold_every_denominator_by_hand():
    # K = 2 thoughts of 5 and 2 tokens, M = 2, one answer without reward and one without tokens; B = 2
    group = group_advantages(torch.tensor([[1.0, NAN], [0.0, 0.5]]), AdvantageConfig())
    lengths = torch.tensor([5, 2]), torch.tensor([[4, 3], [0, 1]])
    weights = token_weights(group, *lengths, only(prompts=2), LossConfig(answer_weight=3.0))
    assert weights.thoughts.tolist() == pytest.approx([1 / (2 * 2 * 5), 1 / (2 * 2 * 2)])
    assert weights.answers.flatten().tolist() == pytest.approx([3 / (2 * 3 * 4), 0.0, 0.0, 3 / (2 * 3 * 1)])


def test_a_thought_none_of_whose_answers_has_a_reward_weighs_nothing():
    group = group_advantages(torch.tensor([[NAN], [0.0], [1.0]]), AdvantageConfig())
    weights = token_weights(group, torch.tensor([3, 3, 3]), torch.ones(3, 1, dtype=torch.long), only(1), LossConfig())
    assert weights.thoughts.tolist() == pytest.approx([0.0, 1 / 6, 1 / 6])
    assert weights.answers.flatten().tolist() == pytest.approx([0.0, 1 / 2, 1 / 2])


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(beta=0.1, epsilon=0.1, epsilon_high=0.3, answer_weight=0.5),
        LossConfig(beta=1.0, answer_weight=0.0),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_nested_loop_twin_for_any_split(seed, config):
    prompts = random_prompts(seed)
    advantages, weights = scored_tokens(prompts, config)
    generator = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(len(weights), generator=generator, dtype=torch.float64)
    old = new + 0.3 * torch.randn(len(weights), generator=generator, dtype=torch.float64)
    ref = new + 0.5 * torch.randn(len(weights), generator=generator, dtype=torch.float64)

    slow = new.clone().requires_grad_()
    objective = slow_objective(prompts, slow, old, ref, config)
    (-objective).backward()

    order = torch.randperm(len(weights), generator=generator)
    for size in (1, 7, len(weights)):
        fast = new.clone().requires_grad_()
        total, sums = 0.0, {}
        for part in order.split(size):
            result = policy_loss(fast[part], old[part], ref[part], advantages[part], weights[part], config)
            result.loss.backward()
            total += result.loss.item()
            sums = {name: sums.get(name, 0.0) + value.item() for name, value in result.sums.items()}
        # weights are float32: 6e-8 relative
        assert total == pytest.approx(-objective.item(), rel=1e-6)
        assert fast.grad is not None
        torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-9)
        counted = weights > 0
        assert sums["tokens"] == counted.sum().item()
        assert sums["ratio"] == pytest.approx((new - old).exp()[counted].sum().item())


def test_on_policy_loss_is_zero_but_its_gradient_is_not():
    config = LossConfig()
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    advantages, weights = scored_tokens([(rewards, torch.tensor([3, 4]), torch.tensor([[1, 2], [3, 1]]))], config)
    new = torch.full_like(advantages, -1.0).requires_grad_()
    result = policy_loss(new, new.detach(), None, advantages, weights, config)
    result.loss.backward()
    assert abs(result.loss.item()) < 1e-7
    torch.testing.assert_close(new.grad, -weights.double() * advantages, rtol=1e-6, atol=0)


def test_gradients_flow_through_logprobs_alone():
    new = tokens(-1.0, -2.0).requires_grad_()
    policy_loss(new, new, new, tokens(1.0, -2.0), tokens(1.0, 1.0), LossConfig(beta=0.1)).loss.backward()
    assert new.grad is not None and new.grad.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_log_ratios_of_any_size_stay_finite_in_float32(gap, advantage):
    new = torch.tensor([-1.0]).requires_grad_()
    result = policy_loss(
        new, new.detach() - gap, new.detach() + gap, torch.tensor([advantage]), torch.ones(1), LossConfig(beta=0.1)
    )
    result.loss.backward()
    assert new.grad is not None and new.grad.isfinite().all() and result.loss.isfinite()
    assert all(value.isfinite() for value in result.sums.values())


def test_a_policy_far_above_the_reference_is_still_pulled_back():
    new = torch.tensor([-0.1]).requires_grad_()
    policy_loss(
        new, new.detach(), torch.tensor([-90.0]), torch.zeros(1), torch.ones(1), LossConfig(beta=1.0)
    ).loss.backward()
    assert new.grad is not None and new.grad.item() == pytest.approx(1.0)  # 1 - exp(-89.9)


def test_no_scored_token_is_a_loss_of_zero_that_can_run_backward():
    none = torch.empty(0)
    result = policy_loss(torch.empty(0, requires_grad=True), none, none, none, none, LossConfig(beta=0.1))
    result.loss.backward()
    assert result.loss.item() == 0.0
    means = loss_metrics({name: value.item() for name, value in result.sums.items()}, LossConfig())
    assert set(means.values()) == {0.0}
