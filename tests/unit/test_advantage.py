import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from vlm_grpo.algorithm.advantage import RULES, AdvantageConfig, group_advantages, group_facts, scaled, step_scales
from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.config import layered_config
from vlm_grpo.common.errors import UserError

NAN = math.nan
POPULATION = AdvantageConfig(std_ddof=0, advantage_epsilon=0.0)
TRL = json.loads(Path(__file__).parents[1].joinpath("cases").joinpath("trl_grpo.json").read_text())


def slow_standardise(values, ddof, epsilon, scale):
    """Nested-loop twin over the values that have a reward; None for the others."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return [None for _ in values]
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in known) / max(len(known) - ddof, 1))
    divisor = std + epsilon if scale == "group" else 1.0
    return [None if math.isnan(v) else ((v - mean) / divisor if std > 1e-9 else 0.0) for v in values]


def slow_advantages(rewards, config):
    values = []
    for row in rewards:
        known = [r for r in row if not math.isnan(r)]
        values.append(statistics.fmean(known) if known else NAN)
    options = (config.std_ddof, config.advantage_epsilon, config.scale_rewards)
    if config.answer_baseline == "prompt":
        width = len(rewards[0])
        flat = slow_standardise([r for row in rewards for r in row], *options)
        answers = [flat[i : i + width] for i in range(0, len(flat), width)]
    else:
        answers = [slow_standardise(row, *options) for row in rewards]
    return slow_standardise(values, *options), answers


def with_none(values, valid):
    return [value if ok else None for value, ok in zip(values.tolist(), valid.tolist(), strict=True)]


def random_rewards(seed):
    generator = torch.Generator().manual_seed(seed)
    num_thoughts, num_answers = torch.randint(1, 6, (2,), generator=generator).tolist()
    rewards = torch.rand((num_thoughts, num_answers), generator=generator, dtype=torch.float64)
    if seed % 3 == 1:
        rewards = rewards.round()  # binary rewards tie
    if seed % 2:
        rewards[torch.rand(rewards.shape, generator=generator) < 0.3] = NAN
    return rewards


def test_two_thoughts_by_hand():
    # V = (1, 1/2), their mean 3/4. Rewards 1 1 1 0: mean 3/4, deviations 1/4 1/4 1/4 -3/4, their squares sum to 3/4.
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    population = group_advantages(rewards, POPULATION)
    assert population.thoughts.tolist() == [1.0, -1.0]  # std 1/4
    third = 1 / math.sqrt(3)  # std sqrt(3/16)
    assert population.answers.flatten().tolist() == pytest.approx([third, third, third, -3 * third], abs=1e-7)

    sample = group_advantages(rewards, AdvantageConfig(advantage_epsilon=0.0))
    root = math.sqrt(0.5)  # std sqrt(2 * 1/16 / 1)
    assert sample.thoughts.tolist() == pytest.approx([root, -root], abs=1e-7)
    assert sample.answers.flatten().tolist() == [0.5, 0.5, 0.5, -1.5]  # std sqrt(3/4 / 3)

    with_epsilon = group_advantages(rewards, AdvantageConfig(advantage_epsilon=0.5))
    assert with_epsilon.answers.flatten().tolist() == [0.25, 0.25, 0.25, -0.75]
    unscaled = group_advantages(rewards, AdvantageConfig(scale_rewards="none"))
    assert unscaled.thoughts.tolist() == [0.25, -0.25]
    assert unscaled.answers.flatten().tolist() == [0.25, 0.25, 0.25, -0.75]


def test_baseline_of_the_thought_compares_answers_of_one_thought_only():
    config = AdvantageConfig(answer_baseline="thought", std_ddof=0, advantage_epsilon=0.0)
    result = group_advantages(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), config)
    assert result.answers.tolist() == [[0.0, 0.0], [1.0, -1.0]]
    assert result.thoughts.tolist() == [1.0, -1.0]
    assert not result.answers_zero_std


def test_answers_without_reward_enter_no_mean_and_get_no_advantage():
    # V = (1, 1/4, none): mean 5/8, deviations ±3/8. Answers 1, 0, 1/2: mean 1/2, sample std 1/2.
    rewards = torch.tensor([[1.0, NAN], [0.0, 0.5], [NAN, NAN]])
    result = group_advantages(rewards, AdvantageConfig(advantage_epsilon=0.0))
    root = math.sqrt(0.5)
    assert result.thoughts.tolist() == pytest.approx([root, -root, 0.0], abs=1e-7)
    assert result.answers.tolist() == [[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]
    assert result.valid_thoughts.tolist() == [True, True, False]
    assert result.valid_answers.tolist() == [[True, False], [True, True], [False, False]]
    assert result.stats.reward_mean == 0.5


def test_a_prompt_without_any_reward_has_advantages_zero_and_no_mean():
    result = group_advantages(torch.full((2, 3), NAN), AdvantageConfig())
    assert result.thoughts.tolist() == [0.0, 0.0]
    assert result.answers.tolist() == [[0.0] * 3] * 2
    assert not result.valid_thoughts.any() and not result.valid_answers.any()
    assert result.thoughts_zero_std and result.answers_zero_std
    assert math.isnan(result.stats.reward_mean)


@pytest.mark.parametrize("baseline", ["prompt", "thought"])
@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("seed", range(12))
def test_advantages_equal_the_nested_loop_twin_and_sum_to_zero(seed, scale, baseline):
    rewards = random_rewards(seed)
    config = AdvantageConfig(scale_rewards=scale, answer_baseline=baseline, std_ddof=seed % 2, advantage_epsilon=0.01)
    result = group_advantages(rewards, config)
    thoughts, answers = slow_advantages(rewards.tolist(), config)
    assert with_none(result.thoughts, result.valid_thoughts) == pytest.approx(thoughts, abs=1e-12)
    for row, valid, expected in zip(result.answers, result.valid_answers, answers, strict=True):
        assert with_none(row, valid) == pytest.approx(expected, abs=1e-12)
    assert abs(result.thoughts.sum().item()) < 1e-12
    assert abs(result.answers.sum().item()) < 1e-12


def test_equal_thought_values_silence_the_thoughts_but_not_the_answers():
    # Both thoughts are worth 1/2, also in floating point where 0.1 + 0.3 + 0.2 and 0.3 + 0.2 + 0.1 may differ.
    for rewards in ([[1.0, 0.0], [0.0, 1.0]], [[0.1, 0.3, 0.2], [0.3, 0.2, 0.1]]):
        result = group_advantages(torch.tensor(rewards), POPULATION)
        assert result.thoughts.tolist() == [0.0, 0.0]
        assert result.thoughts_zero_std and not result.answers_zero_std
        assert result.answers.abs().max() >= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, -7.7, 0.0, 1e6])
def test_equal_rewards_give_exactly_zero_without_help_of_epsilon(value, dtype):
    rewards = torch.full((5, 3), value, dtype=dtype)
    rewards[2, 1] = NAN  # means over 2 and over 3 answers round differently
    for baseline in ("prompt", "thought"):
        config = AdvantageConfig(advantage_epsilon=0.0, answer_baseline=baseline)
        result = group_advantages(rewards, config)
        assert result.thoughts.tolist() == [0.0] * 5
        assert result.answers.tolist() == [[0.0] * 3] * 5
        assert result.thoughts_zero_std and result.answers_zero_std


def test_mean_answer_advantage_is_proportional_to_the_thought_advantage():
    rewards = random_rewards(0)[:, :1].expand(-1, 3) + torch.tensor([0.0, 0.2, 0.7])
    rewards = rewards + 0.1 * torch.rand(rewards.shape, generator=torch.Generator().manual_seed(1))
    result = group_advantages(rewards, POPULATION)
    ratio = result.answers.mean(dim=1) / result.thoughts
    assert ratio.tolist() == pytest.approx([ratio[0].item()] * len(ratio), rel=1e-9)


@pytest.mark.parametrize("group", range(3))
def test_one_answer_per_thought_is_plain_grpo_as_trl_computes_it(group):
    # trl_grpo.json holds the advantages of trl 1.16.0's own trainer, made in float32 by tests/bench/make_trl_grpo.py
    rewards = [NAN if r is None else r for r in TRL["rewards"][group]]
    result = group_advantages(torch.tensor(rewards).unsqueeze(1), AdvantageConfig())
    expected = TRL["advantages"][group]
    if group == 1:  # all rewards are 0.3: there 3e-8 of rounding over 1e-4 gave 3e-4 for each; ours is exactly 0
        assert max(map(abs, expected)) == pytest.approx(2.98e-4, rel=1e-2)
        expected = [0.0] * len(expected)
    assert result.thoughts.tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(result.answers.squeeze(1), result.thoughts)


def test_reward_variance_is_that_between_thoughts_plus_that_within():
    # rewards 1 1 1 0: variance 3/16; V = 1, 1/2: between 1/16; within (0, 1/4): mean 1/8
    stats = group_advantages(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), POPULATION).stats
    assert (stats.reward_mean, stats.reward_variance) == (0.75, 0.1875)
    assert (stats.between_thoughts, stats.within_thoughts) == (0.0625, 0.125)
    for seed in range(12):
        rewards = random_rewards(seed)
        known = [r for r in rewards.flatten().tolist() if not math.isnan(r)]
        stats = group_advantages(rewards, POPULATION).stats
        assert stats.reward_variance == pytest.approx(statistics.pvariance(known), abs=1e-12)
        assert stats.between_thoughts + stats.within_thoughts == pytest.approx(stats.reward_variance, abs=1e-12)


def advantages_of(rewards, **options):
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), AdvantageConfig(**options))
    return result.thoughts.tolist(), result.answers.flatten().tolist()


def test_every_advantage_by_hand():
    # V = 1, 1/2, 0; R = 1 1 1 0 0 0: means 1/2; sample std of V 1/2, of R sqrt(6/4 / 5) = sqrt(0.3)
    rewards = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    root = 0.5 / math.sqrt(0.3)
    up_down = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    expected = {
        "grpo_ma": ([1.0, 0.0, -1.0], [root * s for s in up_down]),
        "grpo": ([root, 0.0, -root], [root * s for s in up_down]),  # a thought has the mean of its answers'
        "mean": ([0.5, 0.0, -0.5], [0.5 * s for s in up_down]),
        "reinforce_pp": ([0.5, 0.0, -0.5], [0.5 * s for s in up_down]),
        "gpg": ([0.5, 0.0, -0.5], [0.5 * s for s in up_down]),
        "rloo": ([0.75, 0.0, -0.75], [0.6 * s for s in up_down]),  # 1 - (1/2 + 0)/2; 1 - 2/5
        "reinforce": ([1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
    }
    assert set(expected) == set(RULES)
    for name, (thoughts, answers) in expected.items():
        found = advantages_of(rewards, advantage=name, advantage_epsilon=0.0)
        assert found == (pytest.approx(thoughts, abs=1e-12), pytest.approx(answers, abs=1e-12)), name
    for name in ("grpo_ma", "grpo"):
        assert advantages_of(rewards, advantage=name, scale_rewards="none") == advantages_of(rewards, advantage="mean")


@pytest.mark.parametrize("seed", range(12))
def test_leave_one_out_equals_its_definition(seed):
    rewards = random_rewards(seed)
    for baseline in ("prompt", "thought"):
        config = AdvantageConfig(advantage="rloo", answer_baseline=baseline)
        result = group_advantages(rewards, config)
        values = [[r for r in row if not math.isnan(r)] for row in rewards.tolist()]
        means = {i: statistics.fmean(row) for i, row in enumerate(values) if row}
        for i in means:
            others = [v for k, v in means.items() if k != i]
            assert result.thoughts[i].item() == pytest.approx(means[i] - statistics.fmean(others) if others else 0.0)
        for i, row in enumerate(rewards.tolist()):
            for j, r in enumerate(row):
                pool = values[i] if baseline == "thought" else [r for row in values for r in row]
                others = list(pool)
                if math.isnan(r):
                    assert result.answers[i, j] == 0.0
                    continue
                others.remove(r)
                expected = r - statistics.fmean(others) if others else 0.0
                assert result.answers[i, j].item() == pytest.approx(expected, abs=1e-12)


def test_a_sequence_has_one_advantage_and_a_thought_the_mean_of_its_sequences():
    rewards = [[1.0, 0.0], [0.0, NAN]]
    for name in RULES:
        if name != "grpo_ma":
            thoughts, answers = advantages_of(rewards, advantage=name, credit="sequence")
            assert answers == advantages_of(rewards, advantage=name)[1]
            assert thoughts == pytest.approx([(answers[0] + answers[1]) / 2, answers[2]], abs=1e-12)
    for name in RULES:  # with one answer a thought's advantage is its sequence's
        thoughts, answers = advantages_of([[1.0], [0.25], [0.0]], advantage=name, credit="sequence")
        assert thoughts == answers


def test_without_a_baseline_equal_rewards_teach_and_with_one_they_do_not():
    for name in RULES:
        thoughts, answers = advantages_of([[0.3, 0.3], [0.3, 0.3]], advantage=name, advantage_epsilon=0.0)
        expected = 0.3 if name == "reinforce" else 0.0
        assert thoughts == [expected] * 2 and answers == [expected] * 4


def graded_step(prompts, config):
    groups = [group_advantages(torch.tensor(rewards, dtype=torch.float64), config) for rewards in prompts]
    return [scaled(group, step_scales(map(group_facts, groups), config)) for group in groups]


def test_reinforce_pp_divides_by_the_standard_deviation_over_the_step():
    prompts = [[[1.0, 0.0], [0.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]], [[NAN, 1.0], [0.5, NAN]], [[NAN, NAN], [NAN, NAN]]]
    for ddof in (0, 1):
        config = AdvantageConfig(advantage="reinforce_pp", std_ddof=ddof, advantage_epsilon=0.01)
        groups = graded_step(prompts, config)
        # answers minus their prompt's mean: 3/4 -1/4 -1/4 -1/4, four 0, ±1/4; thoughts ±1/4, two 0, ±1/4
        std = math.sqrt((0.75**2 + 5 * 0.25**2) / (10 - ddof)) + 0.01
        of_thoughts = math.sqrt(4 * 0.25**2 / (6 - ddof)) + 0.01
        assert groups[0].answers.flatten().tolist() == pytest.approx([x / std for x in (0.75, -0.25, -0.25, -0.25)])
        assert groups[1].answers.abs().max() == 0 and groups[3].answers.abs().max() == 0
        assert groups[2].answers.flatten().tolist() == pytest.approx([0.0, 0.25 / std, -0.25 / std, 0.0])
        assert groups[0].thoughts.tolist() == pytest.approx([0.25 / of_thoughts, -0.25 / of_thoughts])
    config = AdvantageConfig(advantage="reinforce_pp", credit="sequence")
    for group in graded_step(prompts, config):  # one scale for both
        known = group.answers.where(group.valid_answers, NAN)
        assert group.thoughts.tolist() == pytest.approx(known.nanmean(dim=1).nan_to_num().tolist(), abs=1e-12)


def test_gpg_makes_up_for_prompts_whose_rewards_are_equal():
    prompts = [[[1.0, 0.0]], [[0.5, 0.5]], [[1.0, 1.0]], [[NAN, NAN]]]
    groups = graded_step(prompts, AdvantageConfig(advantage="gpg"))
    assert groups[0].answers.tolist() == [[1.5, -1.5]]  # 3 prompts with rewards, 1 of them with different ones
    assert all(not group.answers.any() for group in groups[1:])
    assert graded_step(prompts[1:], AdvantageConfig(advantage="gpg"))[0].answers.tolist() == [[0.0, 0.0]]
    # thoughts are equal, but answers are not: the prompt has a variance
    mixed = graded_step([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]], AdvantageConfig(advantage="gpg"))
    assert mixed[0].answers.flatten().tolist() == [1.0, -1.0, -1.0, 1.0]
    assert not mixed[0].has_zero_variance and mixed[1].has_zero_variance


@pytest.mark.parametrize(
    ("options", "num_answers", "named"),
    [
        ({"advantage": "reinforce_pp", "scale_rewards": "none"}, 4, "scale_rewards=none with advantage=reinforce_pp"),
        ({"credit": "sequence"}, 4, "advantage=grpo_ma and num_answers=4"),
        ({"credit": "sequence", "advantage": "grpo", "answer_baseline": "thought"}, 4, "with credit=sequence"),
        ({"advantage": "grpo", "answer_baseline": "thought"}, 4, "with advantage=grpo, .* always 0"),
        ({"advantage": "reinforce", "answer_baseline": "thought"}, 4, "which has no baseline"),
    ],
)
def test_combinations_without_meaning_are_refused_with_the_reason(options, num_answers, named):
    with pytest.raises(UserError, match=named):
        check(StepConfig(**options, num_answers=num_answers))


def test_other_combinations_are_not_refused():
    for name in RULES:
        check(StepConfig(advantage=name, num_answers=4))
        check(StepConfig(advantage=name, credit="sequence", num_answers=1))
        if name != "grpo_ma":
            check(StepConfig(advantage=name, credit="sequence", num_answers=4))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"std_ddof": 2}, "std_ddof=2"),
        ({"advantage_epsilon": -1.0}, "advantage_epsilon=-1.0"),
        ({"advantage_epsilon": NAN}, "advantage_epsilon=nan"),
        ({"answer_baseline": "thought"}, "num_answers=1"),
    ],
)
def test_unusable_options_are_named(options, named):
    with pytest.raises(UserError, match=named):
        check(layered_config(StepConfig, None, [({"num_answers": 1, **options}, "here")]))
    check(StepConfig(answer_baseline="thought", num_answers=2))
