"""Each loss_type, KL estimator and option of the objective against numbers worked by hand and a nested-loop twin.

Letters: Q scored tokens, S sequences.
"""

import math

import pytest
import torch
from support.losses import MAX_LENGTHS, minibatch_of, random_prompts, tokens

from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages
from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.loss import loss_metrics, policy_loss, token_weights
from vlm_grpo.algorithm.objectives import LossConfig, Objective, clip_range, sequence_means
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.config import layered_config
from vlm_grpo.common.errors import UserError

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo")
PER_SEQUENCE, PER_TOKEN = ("grpo", "gspo", "sapo"), ("bnpo", "dapo", "cispo", "gpg")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "gpg")


def slow_token_loss(ratio, logprob, advantage, config):
    """The loss of one token, written out."""
    if config.loss_type in CLIPPED:
        low, high = 1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
        first = ratio * advantage
        if config.delta is not None and ratio > config.delta:
            first = config.delta * advantage
        second = advantage * (low if ratio < low else high if ratio > high else ratio)
        return -first if first <= second else -second
    if config.loss_type == "cispo":
        cap = 5.0 if config.epsilon_high is None else config.epsilon_high
        return -min(float(ratio.detach()), cap) * advantage * logprob
    if config.loss_type == "sapo":
        tau = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    return -advantage * logprob


def slow_kl(new, ref, ratio, config):
    gap = ref - new
    value = {"k1": -gap, "k2": gap * gap / 2, "k3": torch.exp(gap) - gap - 1}[config.kl_estimator]
    return value * ratio if config.use_bias_correction_kl else value


def sequences_of(prompts):
    """(advantage, length, level 0 or 1, prompt, is valid) of every sequence, in the order of the tokens."""
    found = []
    for number, (rewards, thought_lengths, answer_lengths) in enumerate(prompts):
        group = group_advantages(rewards, AdvantageConfig())
        for i, length in enumerate(thought_lengths.tolist()):
            found.append((float(group.thoughts[i]), length, 0, number, bool((~rewards[i].isnan()).any())))
            for j, answer_length in enumerate(answer_lengths[i].tolist()):
                found.append((float(group.answers[i, j]), answer_length, 1, number, not bool(rewards[i, j].isnan())))
    return found


def slow_loss(prompts, new, old, ref, factors, config):
    """The whole minibatch's loss: each level's mean as the loss_type takes it, then 1 to answer_weight."""
    every = sequences_of(prompts)
    total = torch.zeros((), dtype=torch.float64)
    for level in (0, 1):
        weight = config.answer_weight if level else 1.0
        num_tokens = sum(length for _, length, of, _, valid in every if of == level and valid)
        position = 0
        for advantage, length, of, number, valid in every:
            span = range(position, position + length)
            position += length
            if of != level or not valid or not length:
                continue
            num_sequences = sum(v for _, _, o, n, v in every if o == level and n == number) * len(prompts)
            mean_gap = sum(new[q] - old[q] for q in span) / length
            for q in span:
                ratio = torch.exp(mean_gap if config.loss_type == "gspo" else new[q] - old[q])
                loss = slow_token_loss(ratio, new[q], advantage, config) * float(factors[q])
                if config.beta:
                    loss = loss + config.beta * slow_kl(new[q], ref[q], ratio, config)
                if config.loss_type in PER_SEQUENCE:
                    denominator = num_sequences * length
                else:
                    denominator = num_tokens if config.loss_type in PER_TOKEN else num_sequences * MAX_LENGTHS[level]
                total = total + weight * loss / denominator
    return total


def random_case(seed):
    prompts = random_prompts(seed)
    generator = torch.Generator().manual_seed(seed)
    size = sum(length for _, length, *_ in sequences_of(prompts))
    new = -3 * torch.rand(size, generator=generator, dtype=torch.float64)
    old, ref = (new + scale * torch.randn(size, generator=generator, dtype=torch.float64) for scale in (0.4, 0.6))
    factors = torch.randint(3, (size,), generator=generator) / 2.0
    return prompts, new, old, ref, factors.double()


def given_tokens(prompts, config):
    """(advantages, weights, sequence) per token."""
    advantages, weights, sequence = [], [], []
    for rewards, thought_lengths, answer_lengths in prompts:
        group = group_advantages(rewards, AdvantageConfig())
        weight = token_weights(group, thought_lengths, answer_lengths, minibatch_of(prompts), config)
        for i, length in enumerate(thought_lengths.tolist()):
            rows = [(group.thoughts[i], weight.thoughts[i], length)]
            rows += [(group.answers[i, j], weight.answers[i, j], n) for j, n in enumerate(answer_lengths[i].tolist())]
            for advantage, share, count in rows:
                advantages += [advantage] * count
                weights += [share] * count
                sequence += [(sequence[-1] + 1) if sequence else 0] * count
    return torch.stack(advantages), torch.stack(weights), torch.tensor(sequence)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"beta": 0.2, "kl_estimator": "k2", "epsilon": 0.1, "answer_weight": 0.5},
        {"beta": 0.2, "kl_estimator": "k1", "use_bias_correction_kl": True, "epsilon_high": 1.2},
        {"beta": 0.2, "use_bias_correction_kl": True, "delta": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_equals_the_nested_loop_twin_for_any_split(loss_type, more):
    if loss_type in ("sapo", "gpg"):
        more = {name: value for name, value in more.items() if name != "epsilon_high"}
    if loss_type not in CLIPPED:
        more = {name: value for name, value in more.items() if name != "delta"}
    config = StepConfig(loss_type=loss_type, **more)
    check(config)
    for seed in range(3):
        prompts, new, old, ref, factors = random_case(seed)
        advantages, weights, sequence = given_tokens(prompts, config)
        slow = new.clone().requires_grad_()
        expected = slow_loss(prompts, slow, old, ref, factors, config)
        expected.backward()
        of_sequences = [(sequence == s).nonzero()[:, 0] for s in sequence.unique()]
        generator = torch.Generator().manual_seed(seed)
        for parts in (1, 3, len(of_sequences)):
            order = torch.randperm(len(of_sequences), generator=generator).tolist()
            fast = new.clone().requires_grad_()
            total = 0.0
            for part in range(parts):
                index = torch.cat([of_sequences[i] for i in order[part::parts]])
                result = policy_loss(
                    fast[index],
                    old[index],
                    ref[index],
                    advantages[index],
                    weights[index],
                    config,
                    sequence=sequence[index],
                    factors=factors[index],
                )
                result.loss.backward()
                total += result.loss.item()
            # weights are float32: 6e-8 relative
            assert total == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
            torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-6, atol=1e-9)


def one_token(config, ratio, advantage, logprob=-1.0, **more):
    """(loss, gradient) of one token of weight 1."""
    new = tokens(logprob).requires_grad_()
    old = tokens(logprob - math.log(ratio))
    result = policy_loss(new, old, None, tokens(advantage), tokens(1.0), config, sequence=torch.tensor([0]), **more)
    result.loss.backward()
    return result.loss.item(), new.grad.item()


def test_losses_of_one_token_by_hand():
    cispo = LossConfig(loss_type="cispo")
    assert one_token(cispo, 2.0, 3.0) == pytest.approx((2 * 3 * 1.0, -2 * 3))  # -ratio * A * log π, log π = -1
    assert one_token(cispo, 8.0, 3.0) == pytest.approx((5 * 3 * 1.0, -5 * 3))  # capped, and still with a gradient
    assert one_token(LossConfig(loss_type="cispo", epsilon_high=1.5), 8.0, -2.0) == pytest.approx((-3.0, 3.0))
    # sigmoid(0) * 4 / τ = 2 / τ; its slope τ / 4 * 4 / τ = 1: on policy the gradient is -A, whatever τ
    sapo = LossConfig(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5)
    assert one_token(sapo, 1.0, 3.0) == pytest.approx((-3.0, -3.0))
    assert one_token(sapo, 1.0, -1.0) == pytest.approx((4.0, 1.0))
    # at ratio 2: sigmoid(2) = 0.880797; its slope 0.104994 * 4 * ratio
    assert one_token(sapo, 2.0, 1.0) == pytest.approx((-0.880797 * 2, -0.104994 * 4 * 2), rel=1e-5)
    gpg = LossConfig(loss_type="gpg")
    assert one_token(gpg, 7.0, 3.0, logprob=-0.5) == pytest.approx((1.5, -3.0))  # the ratio is no part of it


def test_two_sided_clip_bounds_the_loss_of_negative_advantages_alone():
    plain, both = LossConfig(), LossConfig(delta=3.0)
    assert one_token(plain, 10.0, -1.0) == pytest.approx((10.0, 10.0))
    assert one_token(both, 10.0, -1.0) == pytest.approx((3.0, 0.0))
    assert one_token(both, 2.0, -1.0) == pytest.approx((2.0, 2.0))
    for ratio in (0.5, 1.1, 10.0):
        assert one_token(both, ratio, 1.0) == pytest.approx(one_token(plain, ratio, 1.0))


def test_gspo_has_one_ratio_for_a_sequence():
    # log-ratios 0.5 and -0.1: mean 0.2; the third token is a sequence of its own
    new = tokens(-1.0, -1.0, -1.0).requires_grad_()
    old = tokens(-1.5, -0.9, -1.0)
    weights = tokens(0.5, 0.5, 1.0)
    config = LossConfig(loss_type="gspo", epsilon=0.3)
    result = policy_loss(new, old, None, tokens(2.0, 2.0, -1.0), weights, config, sequence=torch.tensor([4, 4, 0]))
    result.loss.backward()
    ratio = math.exp(0.2)
    assert result.loss.item() == pytest.approx(-2 * ratio + 1.0)
    assert new.grad.tolist() == pytest.approx([-ratio, -ratio, 1.0])  # d ratio / d token = ratio / 2
    tight = LossConfig(loss_type="gspo", epsilon=0.1)
    result = policy_loss(new, old, None, tokens(2.0, 2.0, -1.0), weights, tight, sequence=torch.tensor([4, 4, 0]))
    assert result.loss.item() == pytest.approx(-2 * 1.1 + 1.0)
    metrics = loss_metrics({name: value.item() for name, value in result.sums.items()}, tight)
    assert metrics["clip_ratio/high_mean"] == 0.5  # one of two sequences, not two of three tokens
    assert metrics["ratio"] == pytest.approx((ratio + 1) / 2)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, -math.log(2)), ("k3", 1 - math.log(2), -1.0)],
)
def test_kl_estimators_by_hand(estimator, value, slope):
    # d = ln 2; slopes: k1: 1; k2: -d; k3: 1 - exp(d). Times the ratio, which is 1 here, its slope is d ratio * k more
    new = tokens(-1.0)
    for corrected in (False, True):
        leaf = new.clone().requires_grad_()
        config = LossConfig(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=corrected)
        result = policy_loss(leaf, new, new + math.log(2), tokens(0.0), tokens(0.5), config)
        result.loss.backward()
        assert result.loss.item() == pytest.approx(0.05 * value)
        assert leaf.grad.item() == pytest.approx(0.05 * (slope + value * corrected))
        assert result.sums["kl"].item() == pytest.approx(value)


def test_estimators_are_right_on_average():
    """Over many tokens of a policy, k1 and k3 have the mean KL(π || π_ref), and k2 has its gradient."""
    policy = tokens(0.5, 0.3, 0.2).log().requires_grad_()
    reference = tokens(0.4, 0.4, 0.2)
    exact = (policy.softmax(0) * (policy.log_softmax(0) - reference.log())).sum()
    slope = torch.autograd.grad(exact, policy)[0]
    for estimator in ("k1", "k2", "k3"):
        leaf = policy.detach().clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        config = LossConfig(beta=1.0, kl_estimator=estimator)
        weights = leaf.detach().softmax(0)  # each token as often as the policy draws it
        result = policy_loss(logprobs, logprobs, reference.log(), tokens(0.0, 0.0, 0.0), weights, config)
        result.loss.backward()
        if estimator in ("k1", "k3"):
            assert result.loss.item() == pytest.approx(exact.item(), rel=1e-9)
        if estimator == "k2":
            torch.testing.assert_close(leaf.grad, slope, rtol=1e-9, atol=1e-12)
        if estimator == "k1":
            assert leaf.grad.abs().max() < 1e-12  # which is why kl_in=loss refuses it


def test_factors_weigh_the_policy_term_but_not_the_penalty_and_the_bonus_is_a_mean():
    new = tokens(-1.0, -1.0, -1.0).requires_grad_()
    entropies = tokens(0.3, 0.5, 0.7).requires_grad_()
    config = LossConfig(beta=0.1, entropy_coef=0.2)
    ref = new.detach() + math.log(2)
    result = policy_loss(
        new,
        new.detach(),
        ref,
        tokens(1.0, 1.0, 1.0),
        tokens(1.0, 1.0, 0.0),
        config,
        factors=tokens(0.5, 0.0, 1.0),
        entropies=entropies,
        num_entropies=4,
    )
    result.loss.backward()
    penalty = 0.1 * 2 * (1 - math.log(2))
    # the first token alone is active: the second has factor 0, the third weight 0
    assert result.loss.item() == pytest.approx(-0.5 + penalty - 0.2 * 0.3 / 4)
    assert entropies.grad.tolist() == pytest.approx([-0.05, 0.0, 0.0])


def test_metrics_name_what_is_clipped():
    sums = dict.fromkeys(("tokens", "ratios"), 4.0) | {"kl": 1.0, "ratio": 4.0, "clipped_low": 1.0, "clipped_high": 2.0}
    always, clip = {"kl": 0.25, "ratio": 1.0}, {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.5}
    names = {"sapo": always, "gpg": always, "cispo": always | {"cispo_clip_ratio": 0.5}}
    names |= {loss_type: always | clip for loss_type in CLIPPED}
    for loss_type, expected in names.items():
        assert loss_metrics(sums, LossConfig(loss_type=loss_type)) == expected


def test_sequence_means_of_none_and_of_several():
    assert sequence_means(torch.empty(0), torch.empty(0, dtype=torch.long)).tolist() == []
    assert sequence_means(tokens(1.0, 2.0, 3.0), torch.tensor([5, 5, 2])).tolist() == [1.5, 1.5, 3.0]


def test_the_table_holds_every_loss_type():
    for loss_type in LOSS_TYPES:
        low, high = clip_range(LossConfig(loss_type=loss_type))
        assert low < 1 < high
    from vlm_grpo.algorithm.objectives import OBJECTIVES

    assert set(OBJECTIVES) == set(LOSS_TYPES) and all(isinstance(o, Objective) for o in OBJECTIVES.values())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"epsilon": 1.5}, "epsilon=1.5"),
        ({"epsilon_high": -1.0}, "epsilon_high=-1.0"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": math.nan}, "beta=nan"),
        ({"answer_weight": math.inf}, "answer_weight=inf"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos=0.0"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg=-1.0"),
        ({"importance_sampling_cap": 0.0}, "importance_sampling_cap=0.0"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0"),
        ({"top_entropy_quantile": 1.1}, "top_entropy_quantile=1.1"),
        ({"loss_type": "sapo", "epsilon_high": 0.28}, "epsilon_high=0.28 .* with loss_type=sapo, which clips nothing"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 does nothing with loss_type=grpo"),
        ({"use_bias_correction_kl": True}, "use_bias_correction_kl=true does nothing with beta=0"),
        ({"loss_type": "gpg", "epsilon_high": 0.28}, "loss_type=gpg, which clips nothing"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "the cap of the ratio itself"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta=2.0 with loss_type=cispo"),
        ({"delta": 1.1}, r"delta=1.1: must be above 1 \+ epsilon_high = 1.2"),
        ({"kl_in": "reward"}, "kl_in=reward with beta=0"),
        ({"kl_in": "reward", "beta": 0.1, "use_bias_correction_kl": True}, "its ratio is 1"),
        ({"kl_estimator": "k1", "beta": 0.1}, "kl_estimator=k1 with kl_in=loss"),
    ],
)
def test_unusable_options_are_named_with_the_reason(options, named):
    with pytest.raises(UserError, match=named):
        check(layered_config(StepConfig, None, [(options, "here")]))


def test_usable_options_are_not_refused():
    for options in (
        {"epsilon_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4, "delta": 1.1},
        {"kl_estimator": "k1", "beta": 0.1, "use_bias_correction_kl": True},
        {"kl_estimator": "k1", "beta": 0.1, "kl_in": "reward"},
    ):
        check(StepConfig(**options))
