"""Whole steps of other objectives: gradients equal nested loops over plain forwards; and what a step does around it.

Letters: K thoughts, M answers.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import families
from support.slow_loss import slow_loss
from support.steps import (
    CONFIG,
    QUESTIONS,
    Watch,
    branch_arguments,
    by_hash,
    make_samples,
    make_trainer,
    make_vlm,
    off_policy,
    perturb,
    relative_error,
)

from vlm_grpo.algorithm.check import check, check_adapter
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import check_ranges
from vlm_grpo.task import Sample
from vlm_grpo.tree import tags as tags_module
from vlm_grpo.tree.types import RolloutTree

NAN = math.nan


@pytest.fixture(autouse=True, scope="module")
def _tables_of_tags_are_built_once():
    """They depend on the tokenizer alone, and shape checks make them slow to build."""
    import functools

    build = functools.cache(tags_module.TagMatcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags_module, "TagMatcher", lambda tag, pieces: build(tag, tuple(pieces)))
        yield


def compared(values: Sequence[float], config) -> list[float]:
    """Advantages of values among themselves; NaN stays."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return list(values)
    mean, count = statistics.fmean(known), len(known)
    flat = max(known) - min(known) < 1e-9
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in known) / max(1, count - 1))
    rules = {
        "grpo_ma": lambda v: (v - mean) / (std + 1e-4),
        "grpo": lambda v: (v - mean) / (std + 1e-4),
        "rloo": lambda v: v - (sum(known) - v) / max(1, count - 1),
        "reinforce": lambda v: v,
        "mean": lambda v: v - mean,
        "reinforce_pp": lambda v: v - mean,
        "gpg": lambda v: v - mean,
    }
    is_zero = flat and config.advantage != "reinforce"
    return [NAN if math.isnan(v) else 0.0 if is_zero else rules[config.advantage](v) for v in values]


def slow_advantages(rewards: list[list[float]], config) -> SimpleNamespace:
    """Of one prompt, by definition."""
    known = [[r for r in row if not math.isnan(r)] for row in rewards]
    flat = compared([r for row in rewards for r in row], config)
    width = len(rewards[0])
    answers = [flat[i : i + width] for i in range(0, len(flat), width)]
    if config.advantage == "grpo" or config.credit == "sequence":
        thoughts = [statistics.fmean([a for a in row if not math.isnan(a)] or [NAN]) for row in answers]
    else:
        thoughts = compared([statistics.fmean(row) if row else NAN for row in known], config)
    return SimpleNamespace(
        thoughts=torch.tensor(thoughts, dtype=torch.float64),
        answers=torch.tensor(answers, dtype=torch.float64),
        valid_thoughts=torch.tensor([bool(row) for row in known]),
        valid_answers=torch.tensor([[not math.isnan(r) for r in row] for row in rewards]),
    )


def scale_over_the_step(groups: list[SimpleNamespace], config) -> None:
    for name in ("thoughts", "answers"):
        values = [v for g in groups for v in getattr(g, name).flatten().tolist() if not math.isnan(v)]
        scale = 1.0
        if config.advantage == "reinforce_pp":
            scale = 1 / (math.sqrt(sum(v * v for v in values) / (len(values) - 1)) + 1e-4)
        if config.advantage == "gpg":
            scale = len(groups) / sum(bool(g.answers.nan_to_num().any()) for g in groups)
        for group in groups:
            setattr(group, name, getattr(group, name) * scale)


class SlowStep:
    """Per-token log-probabilities and entropies of every tree by plain forwards, and the loss of the step."""

    def __init__(self, plain, reference, vlm, config) -> None:
        self.plain, self.reference, self.vlm, self.config = plain, reference, vlm, config

    def per_token(self, model, tree: RolloutTree) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies in the tree's order: thought 0, its answers, thought 1, …"""
        logprobs, entropies = [], []
        for thought in tree.thoughts:
            branches = [(thought.ids, len(thought.ids))]
            branches += [(torch.cat([thought.ids, thought.bridge_ids, a.ids]), len(a.ids)) for a in thought.answers]
            for ids, scored in branches:
                args = branch_arguments(self.vlm, tree.prompt, ids)
                policy = families.unpacked_distributions(model, *args)[-scored:]
                logprobs.append(policy.gather(1, args[1][-scored:, None])[:, 0])
                entropies.append(-(policy.exp() * policy.clamp(min=-1e4)).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies)

    def rewards(self, tree: RolloutTree, ref: torch.Tensor) -> list[list[float]]:
        config, position, rewards = self.config, 0, []
        gaps = ref - torch.cat([x.logprobs for t in tree.thoughts for x in (t, *t.answers)]).double()
        longest = config.max_thought_length + config.max_answer_length
        for thought in tree.thoughts:
            of_thought = gaps[position : position + len(thought.ids)]
            position += len(thought.ids)
            rewards.append([])
            for answer in thought.answers:
                gap = torch.cat([of_thought, gaps[position : position + len(answer.ids)]])
                position += len(answer.ids)
                value = by_hash(tree.prompt.sample, answer.text)
                value = NAN if value is None else value
                if config.soft_punish_cache:
                    over = len(gap) - (longest - config.soft_punish_cache)
                    value -= min(max(over, 0) / config.soft_punish_cache, 1.0)
                if config.kl_in == "reward":
                    estimate = {"k1": -gap, "k2": gap * gap / 2, "k3": gap.exp() - gap - 1}[config.kl_estimator]
                    value -= config.beta * float(estimate.sum())
                rewards[-1].append(value)
        return rewards

    def loss(self, trees: Sequence[RolloutTree]) -> torch.Tensor:
        config = self.config
        new, entropies = zip(*(self.per_token(self.plain, tree) for tree in trees), strict=True)
        with torch.no_grad():
            ref = [self.per_token(self.reference, tree)[0] for tree in trees]
        groups = [slow_advantages(self.rewards(tree, r), config) for tree, r in zip(trees, ref, strict=True)]
        scale_over_the_step(groups, config)
        batch = [
            SimpleNamespace(advantages=group, scored=SimpleNamespace(tree=tree))
            for group, tree in zip(groups, trees, strict=True)
        ]
        sampled = [torch.cat([x.logprobs for t in tree.thoughts for x in (t, *t.answers)]).double() for tree in trees]
        old, factors = sampled, None
        if config.importance_sampling_cap:
            old = [x.detach() for x in new]
            factors = [
                (o - s).exp().clamp(max=config.importance_sampling_cap) for o, s in zip(old, sampled, strict=True)
            ]
        return slow_loss(batch, new, old, entropies, config, factors)


def every_other_closed(tree: RolloutTree) -> RolloutTree:
    """A random model ends nothing by a tag: here, every other thought and answer is as if it had."""
    thoughts = [
        replace(
            t, closed=i % 2 == 0, answers=tuple(replace(a, closed=(i + j) % 2 == 0) for j, a in enumerate(t.answers))
        )
        for i, t in enumerate(tree.thoughts)
    ]
    return replace(tree, thoughts=tuple(thoughts))


STEPS = (
    {"loss_type": "gspo", "advantage": "rloo", "credit": "sequence", "epsilon": 0.02},
    {"loss_type": "dapo", "advantage": "reinforce_pp", "mask_truncated_completions": True},
    {"loss_type": "sapo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    {"loss_type": "cispo", "advantage": "grpo", "credit": "sequence", "entropy_coef": 0.05},
    {"loss_type": "dr_grpo", "advantage": "gpg", "answer_weight": 0.5},
    {"loss_type": "gpg", "advantage": "reinforce"},
    {"beta": 0.05, "kl_in": "reward", "kl_estimator": "k1", "soft_punish_cache": 3},
    {"advantage": "mean", "beta": 0.05, "kl_in": "reward", "kl_estimator": "k3", "credit": "sequence"},
    {"loss_type": "dapo", "advantage": "grpo", "importance_sampling_cap": 1.1},
)


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_loss_and_gradient_of_a_step_equal_nested_loops(options: dict) -> None:
    vlm = make_vlm("gpt2")
    vlm.keep_reference()
    perturb(vlm.model, 0.01)
    start = {n: w.clone() for n, w in vlm.model.state_dict().items()}
    config = replace(CONFIG, max_tokens_per_row=40, **options)
    trainer = make_trainer(vlm, config)
    watch = Watch(trainer, lambda tree: every_other_closed(off_policy(tree)))
    trainer.row_update._agreed = True  # the trees are as if another policy had sampled them
    result = trainer.step(1, make_samples((0, 0, 0)))

    plain, reference = families.load_model("gpt2"), families.load_model("gpt2")
    plain.load_state_dict(start)
    loss = SlowStep(plain, reference, vlm, config).loss(watch.trees)
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    # advantages, token weights and the rewards' penalties are float32
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert relative_error(watch.gradients[0], expected) < 1e-5
    if config.kl_in == "reward":
        assert result.metrics["kl"] != 0
    if config.soft_punish_cache:
        assert -1 <= result.metrics["overlong_penalty"] < 0


def flat_ones(sample: Sample, answer: str) -> float | None:
    """Samples named s0 and s2 give equal rewards to all."""
    return 0.5 if sample.id in ("s0", "s2") else by_hash(sample, answer)


def named(names: Sequence[str]) -> list[Sample]:
    return [Sample(name, [], QUESTIONS[0], None) for name in names]


def test_prompts_of_equal_rewards_make_room_for_other_samples_up_to_the_cap() -> None:
    asked: list[int] = []

    def spares(attempt: int) -> list[Sample]:
        asked.append(attempt)
        return named(["s2", "a", "b"] if attempt == 0 else ["c", "d", "e"])

    config = replace(CONFIG, dynamic_sampling="resample", max_resamples=3)
    results = []
    for _ in range(2):
        trainer = make_trainer(make_vlm("gpt2"), config, flat_ones)
        results.append(trainer.step(1, named(["s0", "s1", "s2"]), spares))
    # s0 is replaced by s2, whose rewards are equal too, and then by c; s2 by b
    assert asked == [0, 1] * 2
    for result in results:
        assert list(dict.fromkeys(row.sample_id for row in result.rows)) == ["c", "s1", "b"]
        assert result.metrics["resampled_prompts"] == 3
        assert result.num_tokens == result.metrics["num_tokens"] + result.metrics["resampled_tokens"]
        assert result.metrics["resampled_tokens"] > 0
        kept = [row.reward for row in result.rows if row.reward is not None]
        every = [*kept, *[0.5] * 18]
        assert result.metrics["reward_sampled"] == pytest.approx(sum(every) / len(every))
        assert result.metrics["frac_reward_zero_std"] == 0
    first, second = ({k: v for k, v in r.metrics.items() if "time" not in k} for r in results)
    assert first == second  # a function of step, seed and samples


def test_a_prompt_whose_rewards_stay_equal_is_kept_after_the_last_attempt() -> None:
    config = replace(CONFIG, dynamic_sampling="resample", max_resamples=2)
    trainer = make_trainer(make_vlm("gpt2"), config, flat_ones)
    asked: list[int] = []
    result = trainer.step(1, named(["s0"]), lambda attempt: asked.append(attempt) or named(["s2"]))
    assert asked == [0, 1] and result.metrics["resampled_prompts"] == 2
    assert result.metrics["frac_reward_zero_std"] == 1 and result.metrics["grad_norm"] == 0


def test_dropped_prompts_leave_the_mean_of_the_others() -> None:
    gradients = []
    for ids, mode in ((["s0", "s1"], "drop"), (["s1"], "none")):
        trainer = make_trainer(make_vlm("gpt2"), replace(CONFIG, dynamic_sampling=mode), flat_ones)
        watch = Watch(trainer)
        # the same trees in both: those of the second prompt would be drawn with other random numbers
        samples = named(ids)
        trees = trees_of_s1()
        trainer.engine.rollout = lambda prompts, *_, trees=trees: [replace_prompt(trees, p) for p in prompts]
        trainer.step(1, samples)
        gradients.append(watch.gradients[0])
    assert relative_error(*gradients) < 1e-12


def trees_of_s1() -> RolloutTree:
    trainer = make_trainer(make_vlm("gpt2"), CONFIG, flat_ones)
    watch = Watch(trainer)
    trainer.step(1, named(["s1"]))
    return watch.trees[0]


def replace_prompt(tree: RolloutTree, prompt) -> RolloutTree:
    return replace(tree, prompt=prompt)


def test_the_reference_follows_the_policy_every_so_many_steps() -> None:
    vlm = make_vlm("gpt2")
    vlm.keep_reference()
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
    trainer = make_trainer(vlm, replace(CONFIG, beta=0.1, learning_rate=0.01, **settings))
    expected = {n: w.clone() for n, w in vlm.reference.named_parameters()}
    for number in (1, 2, 3, 4):
        trainer.step(number, make_samples((0,)))
        if number % 2 == 0:
            policy = dict(vlm.model.named_parameters())
            expected = {n: 0.25 * policy[n].detach() + 0.75 * w for n, w in expected.items()}
        for name, weight in vlm.reference.named_parameters():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)
            assert not weight.requires_grad


@pytest.mark.parametrize("attention", ["sdpa", "levels"])
def test_entropies_of_a_packed_row_are_those_of_plain_forwards(attention: str) -> None:
    vlm = make_vlm("gpt2", attention=attention)
    trainer = make_trainer(vlm, CONFIG)
    watch = Watch(trainer)
    trainer.step(1, make_samples((0, 0)))
    [(row, _)] = watch.packs
    logprobs, entropies = vlm.logprobs_and_entropies(row, None)
    slow = SlowStep(families.load_model("gpt2"), None, vlm, CONFIG)
    expected = [
        torch.cat(x) for x in zip(*(slow.per_token(slow.plain, t) for t in in_order(watch.trees, row)), strict=True)
    ]
    torch.testing.assert_close(logprobs, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropies, expected[1], rtol=1e-9, atol=1e-9)
    entropies.sum().backward()
    expected[1].sum().backward()
    theirs = {n: p.grad for n, p in slow.plain.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in vlm.model.named_parameters() if p.grad is not None}
    assert relative_error(ours, theirs) < 1e-9


def in_order(trees: Sequence[RolloutTree], row) -> list[RolloutTree]:
    """As they lie in the row."""
    names = [tree.prompt.sample.id for tree in trees]
    return [trees[names.index(prompt.sample.id)] for prompt in row.prompts]


def test_a_single_sequence_without_a_baseline_teaches() -> None:
    config = replace(CONFIG, num_thoughts=1, num_answers=1, advantage="reinforce", loss_type="gpg", credit="sequence")
    trainer = make_trainer(make_vlm("gpt2"), config, lambda sample, answer: 1.0)
    assert trainer.step(1, make_samples((0,))).metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_thoughts": 1, "num_answers": 1}, "leaves nothing to compare: .* advantage=reinforce"),
        ({"num_thoughts": 1, "answer_weight": 0.0}, "num_thoughts=1 with answer_weight=0 leaves nothing to compare"),
        ({"advantage": "grpo", "num_thoughts": 1, "answer_weight": 0.0}, "num_thoughts=1 with answer_weight=0"),
        ({"advantage": "grpo", "credit": "sequence", "answer_weight": 0.5}, "answer_weight=0.5 .* credit=sequence"),
        ({"loss_type": "gpg", "num_iterations": 4}, "num_iterations=4 with loss_type=gpg"),
        ({"warmup_steps": 4, "max_steps": 4}, "warmup_steps=4 with max_steps=4"),
        ({"sync_ref_model": True}, "sync_ref_model=true with beta=0"),
        ({"ref_model_sync_steps": 8}, "ref_model_sync_steps=8 does nothing with sync_ref_model=false"),
        ({"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha=0.0"),
        ({"ref_model_sync_steps": 0}, "ref_model_sync_steps=0"),
        ({"soft_punish_cache": 99}, "soft_punish_cache=99"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "cap of the ratio itself"),
        ({"credit": "sequence"}, "credit=sequence with advantage=grpo_ma"),
        ({"mask_truncated_completions": True, "ignore_eos": True}, "with ignore_eos=true leaves nothing to train"),
    ],
)
def test_steps_without_meaning_are_refused_with_the_reason(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        config = replace(CONFIG, **options)
        check_ranges(config)
        check(config)


def test_a_lone_thought_teaches_where_its_answers_or_its_reward_do() -> None:
    alone = replace(CONFIG, num_thoughts=1, warmup_steps=3, max_steps=4)
    check(alone)
    check(replace(alone, advantage="reinforce", answer_weight=0.0))


def test_an_adapter_has_no_reference_that_could_move() -> None:
    from support.steps import with_adapter

    config = replace(CONFIG, beta=0.1, sync_ref_model=True)
    check_adapter(config, lora_r=0)
    with pytest.raises(UserError, match=r"sync_ref_model=true with an adapter \(lora_r=4\)"):
        check_adapter(config, lora_r=4)
    with pytest.raises(AssertionError, match="without its adapter"):
        make_trainer(with_adapter("llama"), config)
