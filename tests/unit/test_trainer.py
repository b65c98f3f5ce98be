"""A whole step equals slow, plain computations of its parts: objective, gradient, passes, metrics; and it learns.

Letters: B prompts, K thoughts, M answers, T and A tokens of a thought and an answer.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from support import families
from support.steps import (
    CONFIG,
    QUESTIONS,
    Oracle,
    Watch,
    branch_arguments,
    by_hash,
    hand_made_tree,
    make_samples,
    make_trainer,
    make_vlm,
    of_answers,
    off_policy,
    perturb,
    relative_error,
    standardised,
    with_adapter,
)

from vlm_grpo.algorithm import minibatch as minibatch_module
from vlm_grpo.algorithm import trainer as trainer_module
from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages
from vlm_grpo.algorithm.stats import step_metrics
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.task import Reward, Sample
from vlm_grpo.tree import tags as tags_module
from vlm_grpo.tree.types import RolloutTree


@pytest.fixture(autouse=True, scope="module")
def _tables_of_tags_are_built_once():
    """They depend on the tokenizer alone, and shape checks make them slow to build."""
    build = functools.cache(tags_module.TagMatcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags_module, "TagMatcher", lambda tag, pieces: build(tag, tuple(pieces)))
        yield


@pytest.mark.parametrize(
    ("name", "tower", "options"),
    [
        ("gpt2", False, {}),
        ("gpt2", False, {"beta": 0.3, "epsilon": 0.1, "epsilon_high": 0.3, "answer_weight": 0.5, "num_answers": 1}),
        ("qwen2_5_vl", False, {"beta": 0.3, "epsilon_high": 0.3}),
        ("qwen2_5_vl", True, {"beta": 0.3, "answer_weight": 2.0}),
        ("llava_onevision", True, {"max_tokens_per_row": 1}),
        ("gemma3", True, {"beta": 0.3}),
    ],
)
def test_loss_and_gradient_of_a_step_equal_nested_loops(name: str, tower: bool, options: dict) -> None:
    vlm = make_vlm(name)
    vlm.keep_reference()
    of_tower = vlm.family.vision_modules or ("no tower",)
    for n, weight in vlm.model.named_parameters():
        weight.requires_grad_(tower or not n.startswith(of_tower))
    perturb(vlm.model, 0.01)
    start = {n: w.clone() for n, w in vlm.model.state_dict().items()}
    config = replace(CONFIG, **options)
    trainer = make_trainer(vlm, config)
    watch = Watch(trainer, off_policy)
    result = trainer.step(1, make_samples((1, 0, 2) if vlm.family.is_vision else (0, 0)))

    plain, reference = families.load_model(name), families.load_model(name)
    plain.load_state_dict(start)
    oracle = Oracle(plain, reference, vlm, by_hash, config)
    loss = oracle.loss(watch.trees)
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    if not tower:
        expected = {n: g for n, g in expected.items() if not n.startswith(of_tower)}
    assert any(n.startswith(of_tower) for n in expected) == tower
    # Advantages and token weights are float32 (eps 6e-8); everything after them is float64
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert relative_error(watch.gradients[0], expected) < 1e-6
    clipped = result.metrics["clip_ratio/low_mean"] + result.metrics["clip_ratio/high_mean"]
    assert clipped > 0.05, f"the case must reach the clipped branch, it did so for {clipped:.0%} of tokens"


def test_images_of_a_trainable_tower_are_encoded_once_where_their_graph_is_kept(monkeypatch) -> None:
    gradients = []
    for patch_values, times in ((trainer_module.PATCH_VALUES, 1), (1, 2)):  # 1: any image is more than a row's tokens
        monkeypatch.setattr(trainer_module, "PATCH_VALUES", patch_values)
        vlm = make_vlm("qwen2_5_vl")
        trainer = make_trainer(vlm, replace(CONFIG, num_iterations=2))
        trainer.row_update._sighted = True  # the check of the first step encodes a negative
        rows: list[int] = []
        vlm.base.model.visual.register_forward_pre_hook(lambda module, given, rows=rows: rows.append(len(given[0])))
        watch = Watch(trainer)
        trainer.step(1, make_samples((1, 0, 2)))
        patches = sum(len(p.pixels["pixel_values"]) for tree in watch.trees if (p := tree.prompt).pixels)
        assert sum(rows) == patches * (times + 1)  # the weights have changed before the second pass
        gradients.append(watch.gradients)
    for kept, encoded_again in zip(*gradients, strict=True):
        assert relative_error(kept, encoded_again) < 1e-12  # float64, other batches of the tower


def test_later_passes_keep_the_rollouts_logprobs_and_leave_its_policy() -> None:
    vlm = make_vlm("gpt2")
    trainer = make_trainer(vlm, replace(CONFIG, num_iterations=2, learning_rate=0.02))
    watch = Watch(trainer)
    trainer.step(1, make_samples((0, 0)))
    (first, new_1), (second, new_2) = watch.packs
    assert torch.equal(first.old_logprobs, second.old_logprobs)
    sampled = torch.cat([x.logprobs for tree in watch.trees for t in tree.thoughts for x in (t, *t.answers)])
    assert torch.equal(first.old_logprobs, sampled)
    # Recorded in float32: 6e-8 of up to 10 nats
    torch.testing.assert_close(new_1, sampled.double(), atol=1e-5, rtol=0)
    moved = (new_2 - new_1).abs()
    assert float(moved.max()) > 0.01
    assert len(watch.gradients) == 2


def test_minibatches_hold_whole_prompts_and_every_prompt_once_a_pass() -> None:
    vlm = make_vlm("gpt2")
    config = replace(CONFIG, num_iterations=2, prompts_per_minibatch=2, learning_rate=0.02)
    trainer = make_trainer(vlm, config)
    watch = Watch(trainer)
    trainer.step(1, make_samples((0, 0, 0)))
    rows = [[prompt.sample.id for prompt in pack.prompts] for pack, _ in watch.packs]
    assert rows == [["s0", "s1"], ["s2"]] * 2
    assert len(watch.gradients) == 4
    # the minibatch, not the step, is the denominator of its prompts
    weight = [float(pack.weights.sum()) for pack, _ in watch.packs]
    assert weight == pytest.approx([2.0] * 4, rel=1e-5)  # thoughts' term and answers' term, 1 each
    ratios = [float((new - pack.old_logprobs).abs().max()) for pack, new in watch.packs]
    assert ratios[0] < 1e-5 and all(gap > 1e-3 for gap in ratios[1:])


def test_a_sample_that_comes_twice_in_a_step_is_in_two_minibatches() -> None:
    """As where a step runs across the border of two epochs."""
    trainer = make_trainer(make_vlm("gpt2"), replace(CONFIG, prompts_per_minibatch=1))
    watch = Watch(trainer)
    [sample] = make_samples((0,))
    trainer.step(1, [sample, sample])
    assert [len(pack.prompts) for pack, _ in watch.packs] == [1, 1]


def flat_second(sample: Sample, answer: str) -> float | None:
    """The second sample's answers are all worth the same."""
    return 0.5 if sample.id == "s1" else by_hash(sample, answer)


def test_trees_without_advantage_add_nothing_and_are_left_out(monkeypatch) -> None:
    gradients, packed = [], []
    for leaves_out in (True, False):
        vlm = make_vlm("gpt2")
        trainer = make_trainer(vlm, CONFIG, flat_second)
        if not leaves_out:
            monkeypatch.setattr(minibatch_module, "teaches", lambda advantages, config: True)
        watch = Watch(trainer)
        result = trainer.step(1, make_samples((0, 0, 0)))
        gradients.append(watch.gradients[0])
        packed.append(sorted(p.sample.id for pack, _ in watch.packs for p in pack.prompts))
        assert result.metrics["frac_reward_zero_std"] == result.metrics["frac_thought_zero_std"] == 1 / 3
    assert packed == [["s0", "s2"], ["s0", "s1", "s2"]]
    assert relative_error(*gradients) < 1e-12  # float64, other order of sums


def test_a_step_without_any_advantage_leaves_weights_and_momentum() -> None:
    flat = False
    config = replace(CONFIG, learning_rate=0.01, weight_decay=0.1)
    trainer = make_trainer(make_vlm("gpt2"), config, lambda s, a: 0.5 if flat else by_hash(s, a))
    trainer.step(1, make_samples((0,)))
    state = trainer.optimizer.adamw.state
    before = [(p.detach().clone(), state[p]["exp_avg"].clone()) for _, p in trainer.optimizer.named]
    assert any(momentum.any() for _, momentum in before)
    flat = True
    metrics = trainer.step(2, make_samples((0,))).metrics
    assert (metrics["grad_norm"], metrics["loss"], metrics["skipped_steps"]) == (0.0, 0.0, 0.0)
    for (weight, momentum), (_, p) in zip(before, trainer.optimizer.named, strict=True):
        assert torch.equal(p, weight) and torch.equal(state[p]["exp_avg"], momentum)


def test_thoughts_and_answers_are_masked_apart() -> None:
    """Equal means of thoughts with unequal answers teach the answers only."""
    vlm = make_vlm("gpt2")
    trainer = make_trainer(vlm, replace(CONFIG, num_thoughts=2), lambda sample, answer: 0.0)
    rewards = iter([0.0, 1.0, 1.0, 0.0])
    trainer.tasks[""].rule = lambda sample, answer: next(rewards)
    watch = Watch(trainer)
    result = trainer.step(1, make_samples((0,)))
    assert (result.metrics["frac_thought_zero_std"], result.metrics["frac_reward_zero_std"]) == (1.0, 0.0)
    [(pack, _)] = watch.packs
    assert not pack.advantages[~of_answers(pack)].any()
    assert pack.advantages[of_answers(pack)].all()


def test_answers_without_reward_are_in_no_mean_and_no_loss() -> None:
    vlm = make_vlm("gpt2")
    rewards = iter([1.0, None, math.nan, None, 0.0, 0.5])  # thought 1 has no reward at all
    trainer = make_trainer(vlm, CONFIG, lambda sample, answer: next(rewards))
    watch = Watch(trainer)
    result = trainer.step(1, make_samples((0,)))
    assert result.metrics["answers_without_reward"] == 3
    assert result.metrics["reward"] == 0.5
    assert [row.reward for row in result.rows] == [1.0, None, None, None, 0.0, 0.5]
    # values of thoughts: 1 and 0.25, so ± sqrt(1/2); answers 1, 0, 0.5 with standard deviation 0.5
    thoughts = [row.thought_advantage for row in result.rows]
    assert thoughts == pytest.approx([0.7071, 0.7071, 0, 0, -0.7071, -0.7071], abs=2e-4)
    assert [row.answer_advantage for row in result.rows] == pytest.approx([1, 0, 0, 0, -1, 0], abs=3e-4)
    [(pack, _)] = watch.packs
    assert float(pack.weights[~of_answers(pack)].sum()) == pytest.approx(1.0)
    assert float(pack.weights[of_answers(pack)].sum()) == pytest.approx(1.0)
    dead = len(watch.trees[0].thoughts[1].ids) + sum(
        len(watch.trees[0].thoughts[i].answers[j].ids) for i, j in ((0, 1), (1, 0), (1, 1))
    )
    assert int((pack.weights == 0).sum()) == dead


def test_a_step_in_which_no_answer_has_a_reward_teaches_nothing() -> None:
    trainer = make_trainer(make_vlm("gpt2"), replace(CONFIG, learning_rate=0.1), lambda sample, answer: None)
    before = [p.detach().clone() for _, p in trainer.optimizer.named]
    result = trainer.step(1, make_samples((0,)))
    assert math.isnan(result.metrics["reward"]) and result.metrics["loss"] == 0.0
    assert all(torch.equal(old, p) for old, (_, p) in zip(before, trainer.optimizer.named, strict=True))


def test_rate_follows_the_schedule_and_the_norm_is_clipped() -> None:
    vlm = make_vlm("gpt2")
    config = replace(CONFIG, learning_rate=0.01, lr_scheduler="linear", warmup_steps=2, max_steps=4, max_grad_norm=0.05)
    trainer = make_trainer(vlm, config)
    watch = Watch(trainer)
    logged = [trainer.step(number, make_samples((0, 0))).metrics for number in (1, 2, 3, 4)]
    assert watch.rates == [m["learning_rate"] for m in logged] == pytest.approx([0.005, 0.01, 0.01, 0.005])
    for gradient, metrics in zip(watch.gradients, logged, strict=True):
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        assert metrics["grad_norm"] > 0.05
        assert norm == pytest.approx(0.05, rel=1e-4)  # clip_grad_norm_ adds 1e-6 to the norm it divides by


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_reference_of_an_adapter_is_the_model_without_it(name: str) -> None:
    vlm = with_adapter(name)
    config = replace(CONFIG, beta=0.3)
    samples = make_samples((1, 0) if vlm.family.is_vision else (0, 0))
    trainer = make_trainer(vlm, config)
    # An adapter starts at 0, so the first step is at the reference
    assert trainer.step(1, samples).metrics["kl"] == pytest.approx(0, abs=1e-12)

    vlm = with_adapter(name)
    perturb(vlm.model, 0.05)
    adapters = {n: w.clone() for n, w in vlm.model.state_dict().items()}
    trainer = make_trainer(vlm, config)
    watch = Watch(trainer)
    kl = trainer.step(1, samples).metrics["kl"]

    merged = with_adapter(name).model
    merged.load_state_dict(adapters)
    plain, reference = merged.merge_and_unload().eval(), families.load_model(name)
    plain.set_attn_implementation("sdpa")
    total, tokens = 0.0, 0
    with torch.no_grad():
        for tree in watch.trees:
            for ids, scored in valid_branches(tree):
                args = branch_arguments(vlm, tree.prompt, ids)
                new, ref = (families.unpacked_logprobs(m, *args)[-scored:] for m in (plain, reference))
                total += float(((ref - new).exp() - (ref - new) - 1).sum())
                tokens += scored
    assert kl > 1e-4
    assert kl == pytest.approx(total / tokens, rel=1e-6)


def valid_branches(tree: RolloutTree):
    """Thoughts and answers that count, as (ids from the prompt on, number of scored tokens at the end)."""
    for thought in tree.thoughts:
        graded = [a for a in thought.answers if by_hash(tree.prompt.sample, a.text) is not None]
        if graded:
            yield thought.ids, len(thought.ids)
        for answer in graded:
            yield torch.cat([thought.ids, thought.bridge_ids, answer.ids]), len(answer.ids)


def test_one_answer_per_thought_is_plain_grpo() -> None:
    """Both parts of a completion carry the completion's advantage, (r - mean) / (std + 1e-4)."""
    config = replace(CONFIG, num_thoughts=4, num_answers=1)
    trainer = make_trainer(make_vlm("gpt2"), config, lambda s, a: by_hash(s, a) or 0.0)
    result = trainer.step(1, make_samples((0, 0)))
    for sample_id in ("s0", "s1"):
        rows = [row for row in result.rows if row.sample_id == sample_id]
        expected = standardised([row.reward for row in rows])
        assert any(expected)
        assert [row.thought_advantage for row in rows] == pytest.approx(expected, abs=1e-5)
        assert [row.answer_advantage for row in rows] == pytest.approx(expected, abs=1e-5)


def test_metrics_equal_hand_worked_numbers() -> None:
    trees = []
    for rewards, lengths, open_ends in (
        ([[1.0, 0.0], [1.0, 1.0]], [(4, (1, 2)), (8, (3, 2))], {(1,), (0, 0), (1, 1)}),
        ([[0.5, None], [0.5, 0.5]], [(2, (1, 1)), (2, (1, 1))], set()),
    ):
        tree = hand_made_tree(lengths, open_ends)
        graded = tuple(tuple(None if r is None else Reward(r, {"iou": r * r}) for r in row) for row in rewards)
        scored = ScoredTree(tree, (("", ""), ("", "")), graded)
        trees.append((scored, group_advantages(scored.values, AdvantageConfig())))
    metrics = step_metrics(trees, Processes())
    expected = {
        "reward": 4.5 / 7,
        "reward_std": (math.sqrt(3) / 4 + 0) / 2,  # of a prompt's rewards (population), mean over prompts
        "reward_between_thoughts": (1 / 16) / 2,  # thoughts' means 1/2 and 1 around 3/4
        "reward_within_thoughts": (1 / 8) / 2,
        "reward_variance_ratio": 2.0,  # within over between
        "frac_reward_zero_std": 0.5,
        "frac_thought_zero_std": 0.5,
        "answers_without_reward": 1.0,
        "thoughts/mean_length": 16 / 4,
        "answers/mean_length": 12 / 8,
        "thoughts/clipped_ratio": 1 / 4,
        "answers/clipped_ratio": 2 / 8,
        "entropy": 0.25,
        "num_tokens": 28.0,
        "num_prompts": 2.0,
        "rewards/iou/mean": 3.75 / 7,
        "rewards/iou/std": math.sqrt((3 + 3 / 16) / 7 - (3.75 / 7) ** 2),
    }
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_step_reports_its_metrics_and_the_entropy_of_its_policy() -> None:
    vlm = make_vlm("qwen2_5_vl")
    trainer = make_trainer(vlm, CONFIG)
    watch = Watch(trainer)
    result = trainer.step(1, make_samples((1, 0)))
    assert set(result.metrics) >= {
        *("reward", "reward_std", "frac_reward_zero_std", "frac_thought_zero_std", "rewards/half/mean", "loss", "kl"),
        *("ratio", "clip_ratio/low_mean", "clip_ratio/high_mean", "entropy", "grad_norm", "learning_rate"),
        *("thoughts/mean_length", "answers/mean_length", "thoughts/clipped_ratio", "answers/clipped_ratio"),
        *("num_tokens", "step_time", "time/rollout", "time/update", "skipped_steps", "skipped_bad_samples"),
    }
    total = 0.0
    plain = families.load_model("qwen2_5_vl")
    with torch.no_grad():
        for tree in watch.trees:
            for thought in tree.thoughts:
                branches = [(thought.ids, len(thought.ids))]
                branches += [(torch.cat([thought.ids, thought.bridge_ids, a.ids]), len(a.ids)) for a in thought.answers]
                for ids, sampled in branches:
                    policy = families.unpacked_distributions(plain, *branch_arguments(vlm, tree.prompt, ids))[-sampled:]
                    total += float(torch.special.entr(policy.exp()).sum())
    tokens = sum(tree.num_sampled for tree in watch.trees)
    assert result.num_tokens == result.metrics["num_tokens"] == tokens
    assert result.metrics["entropy"] == pytest.approx(total / tokens, rel=1e-6)
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert result.metrics["reward"] == pytest.approx(
        sum(r.reward for r in result.rows if r.reward is not None) / sum(r.reward is not None for r in result.rows)
    )


def test_same_seed_same_step_and_another_step_another_sample() -> None:
    texts = []
    for number in (1, 1, 2):
        result = make_trainer(make_vlm("gpt2"), CONFIG).step(number, make_samples((0,)))
        texts.append([(row.thought, row.model_answer) for row in result.rows])
    assert texts[0] == texts[1] != texts[2]


def test_an_image_of_one_colour_is_no_sign_of_blindness() -> None:
    from PIL import Image

    trainer = make_trainer(make_vlm("qwen2_5_vl", torch.float32), CONFIG)
    trainer.step(1, [Sample("white", [Image.new("RGB", (56, 56), "white")], QUESTIONS[0], None)])


def test_a_model_that_does_not_look_is_refused(monkeypatch) -> None:
    vlm = make_vlm("qwen2_5_vl")
    trainer = make_trainer(vlm, CONFIG)
    logprobs = vlm.logprobs
    first: list = []

    def blind(pack, features):
        first.append(features)
        return logprobs(pack, first[0])

    monkeypatch.setattr(vlm, "logprobs", blind)
    with pytest.raises(UserError, match="does not look at its images"):
        trainer.step(1, make_samples((1,)))


def test_training_raises_an_easy_reward() -> None:
    vlm = make_vlm("llama", torch.float32)
    config = replace(CONFIG, num_thoughts=2, num_answers=4, max_thought_length=2, learning_rate=1e-2, max_grad_norm=1.0)
    trainer = make_trainer(vlm, config, lambda sample, answer: answer.count("e") / config.max_answer_length)
    rewards = [trainer.step(number, make_samples((0,))).metrics["reward"] for number in range(1, 16)]
    before, after = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert after > before + 0.4, f"rewards {rewards}: mean reward went from {before:.3f} to {after:.3f}"
