"""A whole step equals slow, plain computations of its parts: objective, gradient, passes, metrics; and it learns.

Letters: B prompts, K thoughts, M answers, T and A tokens of a thought and an answer.
"""

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_exact import inputs_of
from torch import Tensor

from vlm_grpo.algorithm import minibatch as minibatch_module
from vlm_grpo.algorithm import trainer as trainer_module
from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages
from vlm_grpo.algorithm.stats import step_metrics
from vlm_grpo.algorithm.trainer import StepConfig, Trainer
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.task import Reward, Sample, TaskAdapter
from vlm_grpo.tree import tags as tags_module
from vlm_grpo.tree.pack import TreePack
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought

QUESTIONS = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
# A norm that is never reached leaves the gradient as it is; weights move by 0, so that every pass sees the same ones
CONFIG = StepConfig(
    num_thoughts=3,
    num_answers=2,
    max_thought_length=5,
    max_answer_length=4,
    temperature=0.8,
    max_grad_norm=math.inf,
    learning_rate=0.0,
)


@pytest.fixture(autouse=True, scope="module")
def _tables_of_tags_are_built_once():
    """They depend on the tokenizer alone, and shape checks make them slow to build."""
    build = functools.cache(tags_module.TagMatcher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags_module, "TagMatcher", lambda tag, pieces: build(tag, tuple(pieces)))
        yield


RewardRule = Callable[[Sample, str], float | None]


class Rule(TaskAdapter):
    """A task without data of its own: the reward is what `rule` says."""

    def __init__(self, rule: RewardRule) -> None:
        self.rule = rule

    def samples(self, split: str) -> Sequence[Sample]:
        raise NotImplementedError

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        value = self.rule(sample, answer)
        return None if value is None else Reward(value, {"half": value / 2})

    def reference_answer(self, sample: Sample) -> str:
        raise NotImplementedError


def by_hash(sample: Sample, answer: str) -> float | None:
    """Six different rewards, as good as random, and none for one answer in seven."""
    grade = zlib.crc32(answer.encode("utf-8", "surrogatepass")) % 7
    return None if grade == 6 else grade / 5


def make_samples(images: Sequence[int]) -> list[Sample]:
    return [Sample(f"s{i}", families.noise_images(count, i), QUESTIONS[i % 3], None) for i, count in enumerate(images)]


def make_trainer(vlm: VLM, config: StepConfig, rule: RewardRule = by_hash) -> Trainer:
    task = Rule(rule)
    return Trainer(vlm, task, PromptReader(vlm.prompts, task, DataConfig(), 10_000), config, Processes())


def make_vlm(name: str, dtype: torch.dtype = torch.float64, **options) -> VLM:
    return VLM(families.load_model(name, dtype), families.load_processor(name), CONFIG.temperature, **options)


@torch.no_grad()
def perturb(model: torch.nn.Module, size: float) -> None:
    """Move every trainable weight by normal noise of this size."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.requires_grad:
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


class Watch:
    """What a trainer grew, scored and gave to its optimiser, seen through its own methods."""

    def __init__(self, trainer: Trainer, change: Callable[[RolloutTree], RolloutTree] = lambda tree: tree) -> None:
        self.trees: list[RolloutTree] = []
        self.gradients: list[dict[str, Tensor]] = []  # per optimiser step
        self.rates: list[float] = []
        self.packs: list[trainer_module.Any] = []  # rows that were scored, in order
        rollout, logprobs = trainer.engine.rollout, trainer.vlm.logprobs
        named = trainer.optimizer.named

        def watched_rollout(*args):
            self.trees = [change(tree) for tree in rollout(*args)]
            return self.trees

        def watched_logprobs(pack, features):
            values = logprobs(pack, features)
            if values.requires_grad:
                self.packs.append((pack, values.detach()))
            return values

        def watched_step(*_):
            self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
            self.rates.append(trainer.optimizer.adamw.param_groups[0]["lr"])

        trainer.engine.rollout, trainer.vlm.logprobs = watched_rollout, watched_logprobs
        trainer.optimizer.adamw.register_step_pre_hook(watched_step)


def off_policy(tree: RolloutTree) -> RolloutTree:
    """The tree as if an older policy had sampled it: log-probabilities lower or higher by up to 0.5."""
    generator = torch.Generator().manual_seed(len(tree.prompt.ids))

    def moved(logprobs: Tensor) -> Tensor:
        return logprobs + torch.rand(logprobs.shape, generator=generator) - 0.5

    thoughts = [
        replace(
            thought,
            logprobs=moved(thought.logprobs),
            answers=tuple(replace(a, logprobs=moved(a.logprobs)) for a in thought.answers),
        )
        for thought in tree.thoughts
    ]
    return RolloutTree(tree.prompt, tuple(thoughts))


def standardised(values: Sequence[float]) -> list[float]:
    """(x - mean) / (std + 1e-4) with the sample standard deviation; zeros where all are equal."""
    mean = sum(values) / len(values)
    if max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + 1e-4) for v in values]


def branch_arguments(vlm: VLM, prompt: Prompt, ids: Tensor):
    """What `families.unpacked_logprobs` takes after the model; cloned, for ids that grew in inference mode have no
    place in a graph.
    """
    return inputs_of(vlm, prompt), ids.clone(), vlm.temperature, vlm.forbidden.tolist()


@dataclass
class Oracle:
    """The objective by nested loops over unpacked forwards, one ordinary pass per branch."""

    plain: torch.nn.Module
    reference: torch.nn.Module
    vlm: VLM  # for its table of forbidden ids and its prompts only
    rule: RewardRule
    config: StepConfig

    def loss(self, trees: Sequence[RolloutTree]) -> Tensor:
        rewards = [
            [[self.rule(tree.prompt.sample, a.text) for a in t.answers] for t in tree.thoughts] for tree in trees
        ]
        total = torch.zeros((), dtype=torch.float64)
        counted = sum(any(r is not None for row in of_tree for r in row) for of_tree in rewards)
        for tree, of_tree in zip(trees, rewards, strict=True):
            total = total + self._tree(tree, of_tree) / counted
        return total

    def _tree(self, tree: RolloutTree, rewards: list[list[float | None]]) -> Tensor:
        values = {}  # of the valid thoughts
        for i, row in enumerate(rewards):
            earned = [r for r in row if r is not None]
            if earned:
                values[i] = sum(earned) / len(earned)
        of_thought = dict(zip(values, standardised(list(values.values())), strict=True)) if values else {}
        graded = {(i, j): r for i, row in enumerate(rewards) for j, r in enumerate(row) if r is not None}
        of_answer = dict(zip(graded, standardised(list(graded.values())), strict=True)) if graded else {}
        total = torch.zeros((), dtype=torch.float64)
        for i, advantage in of_thought.items():
            thought = tree.thoughts[i]
            branch = self._branch(tree.prompt, thought.ids, len(thought.ids), thought.logprobs, advantage)
            total = total + branch / len(of_thought)
        for (i, j), advantage in of_answer.items():
            thought, answer = tree.thoughts[i], tree.thoughts[i].answers[j]
            ids = torch.cat([thought.ids, thought.bridge_ids, answer.ids])
            branch = self._branch(tree.prompt, ids, len(answer.ids), answer.logprobs, advantage)
            total = total + self.config.answer_weight * branch / len(of_answer)
        return total

    def _branch(self, prompt: Prompt, ids: Tensor, scored: int, old: Tensor, advantage: float) -> Tensor:
        """Mean loss of the last `scored` tokens."""
        args = branch_arguments(self.vlm, prompt, ids)
        logprobs = families.unpacked_logprobs(self.plain, *args)[-scored:]
        with torch.no_grad():
            reference = families.unpacked_logprobs(self.reference, *args)[-scored:]
        low, high = 1 - self.config.epsilon, 1 + (self.config.epsilon_high or self.config.epsilon)
        total = torch.zeros((), dtype=torch.float64)
        for new, before, ref in zip(logprobs, old.tolist(), reference, strict=True):
            ratio = (new - before).exp()
            clipped = ratio.clamp(low, high)
            objective = ratio * advantage if ratio * advantage <= clipped * advantage else clipped * advantage
            k3 = (ref - new).exp() - (ref - new) - 1
            total = total - objective + self.config.beta * k3
        return total / scored


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) >= {n for n, g in theirs.items() if g.abs().max() > 0}
    difference = sum(float((ours[n] - theirs[n]).square().sum()) for n in theirs)
    return math.sqrt(difference / sum(float(g.square().sum()) for g in theirs.values()))


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


def of_answers(row: TreePack) -> Tensor:
    """Of each scored token, whether it is an answer's: one of a leaf."""
    return torch.tensor([segment not in row.parents for segment in range(len(row.parents))])[row.owner]


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


def with_adapter(name: str) -> VLM:
    vlm = make_vlm(name)
    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks for a name that transformers has deprecated
    targets = [n for n, m in vlm.model.named_modules() if n.endswith(("q_proj", "v_proj", "gate_proj"))]
    model = get_peft_model(vlm.model, LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    return VLM(model.double(), vlm.processor, CONFIG.temperature)


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


def hand_made_tree(lengths: Sequence[tuple[int, Sequence[int]]], open_ends: set[tuple[int, ...]]) -> RolloutTree:
    """Thoughts and answers of these lengths; `open_ends` are the indices of those cut by their length."""
    ids = torch.tensor([1, 2])
    prompt = Prompt(Sample("s", [], "q", None), "q", ids, torch.arange(2)[None], torch.tensor([-1, -1]), {})

    def fields(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ones(count, dtype=torch.long), torch.zeros(count), torch.full((count,), 0.25)

    thoughts = []
    for i, (length, answers) in enumerate(lengths):
        grown = tuple(Answer(*fields(n), (i, j) not in open_ends, "", "") for j, n in enumerate(answers))
        thoughts.append(Thought(*fields(length), ids[:0], (i,) not in open_ends, "", "", grown))
    return RolloutTree(prompt, tuple(thoughts))


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
