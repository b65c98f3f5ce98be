"""A minibatch of trees as one objective: TRL's numbers where a tree is a plain group, and nested loops where it is not.

Letters: K thoughts, M answers, Q scored tokens, E tokens of sequences.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.slow_loss import slow_loss
from support.steps import of_answers

from vlm_grpo.algorithm.advantage import group_advantages
from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.loss import loss_metrics
from vlm_grpo.algorithm.minibatch import (
    Graded,
    ObjectiveConfig,
    count_active,
    count_minibatch,
    is_counted,
    row_loss,
    segments_of,
    teaches,
    trained_lengths,
    with_top_entropies,
)
from vlm_grpo.algorithm.shaping import importance_weights
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.processes import Processes
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.task import Sample
from vlm_grpo.tree.pack import pack, path_sequences
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought

TRL = json.loads(Path(__file__).parents[1].joinpath("cases").joinpath("trl_grpo.json").read_text())
THOUGHT, LONGEST = 5, 9  # tokens of a completion that are taken as its thought, and of the longest completion


def make_tree(branches, open_ends=()) -> RolloutTree:
    """From (log-probabilities, entropies) of each thought and of its answers; `open_ends` as in (0,) and (0, 1)."""
    ids = torch.tensor([1, 2])
    prompt = Prompt(Sample("s", [], "q", None), "q", ids, torch.arange(2)[None], torch.tensor([-1, -1]), {})

    def fields(logprobs, entropies):
        return torch.ones(len(logprobs), dtype=torch.long), logprobs, entropies

    thoughts = []
    for i, (thought, answers) in enumerate(branches):
        grown = tuple(Answer(*fields(*a), (i, j) not in open_ends, "", "") for j, a in enumerate(answers))
        thoughts.append(Thought(*fields(*thought), ids[:0], (i,) not in open_ends, "", "", grown))
    return RolloutTree(prompt, tuple(thoughts))


def grade(tree: RolloutTree, rewards, config: ObjectiveConfig, place: int = 0, **more) -> Graded:
    advantages = group_advantages(torch.tensor(rewards), config)
    return Graded(ScoredTree(tree, (), ()), advantages, None, place, **more)


@pytest.mark.parametrize("case", TRL["losses"]["cases"], ids=lambda case: str(case["options"]))
def test_one_answer_per_thought_as_one_sequence_is_the_classical_algorithm_as_trl_computes_it(case) -> None:
    """trl_grpo.json holds losses, metrics and gradients of trl 1.16.0's own _compute_loss in float64, made by
    tests/bench/make_trl_grpo.py. A completion is cut in two, a thought and its answer.
    """
    record, options = TRL["losses"], case["options"]
    names = ("logprobs", "old_logprobs", "ref_logprobs", "sampling_logprobs", "entropies")
    new, old, ref, sampling, entropies = (torch.tensor(record[name], dtype=torch.float64) for name in names)
    sizes = {"max_thought_length": THOUGHT, "max_answer_length": LONGEST - THOUGHT, "num_answers": 1}
    config = StepConfig(credit="sequence", **sizes, **options)
    check(config)

    lengths = record["lengths"]
    other = sampling if config.importance_sampling_cap else old
    branches = []
    for i, length in enumerate(lengths):
        thought, answer = slice(0, THOUGHT), slice(THOUGHT, length)
        branches.append(
            ((other[i, thought], entropies[i, thought]), [(other[i, answer], entropies[i, answer])]),
        )
    tree = make_tree(branches, {(record["truncated"], 0)})
    mask = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    more = {}
    if config.importance_sampling_cap:
        weights = importance_weights(old[mask], sampling[mask], config.importance_sampling_cap)
        more["rescored"] = (old[mask], weights)
    graded = grade(tree, [[r] for r in TRL["rewards"][2]], config, **more)

    trees = [segments_of(graded, count_minibatch([graded], config, Processes()), config)]
    if config.top_entropy_quantile < 1:
        trees = with_top_entropies([graded], trees, config.top_entropy_quantile, Processes())
    new.requires_grad_()
    entropies.requires_grad_()
    row = pack(trees)
    num_entropies = count_active(trees, config, Processes())
    result = row_loss(row, new[mask], ref[mask], entropies[mask], num_entropies, config)
    result.loss.backward()

    # advantages and weights are float32: 6e-8 relative
    assert result.loss.item() == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(new.grad, torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-6, atol=1e-7)
    if "entropy_gradient" in case:
        expected = torch.tensor(case["entropy_gradient"], dtype=torch.float64)
        torch.testing.assert_close(entropies.grad, expected, rtol=1e-6, atol=1e-9)
    metrics = loss_metrics({name: value.item() for name, value in result.sums.items()}, config)
    for name, value in case["metrics"].items():
        if config.loss_type == "gspo" and config.mask_truncated_completions and name != "kl":
            value = value * 6 / 5  # there a masked sequence, whose ratio is 1, is one of the six
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_the_cases_of_trl_reach_every_branch() -> None:
    cases = TRL["losses"]["cases"]
    types = {case["options"]["loss_type"] for case in cases}
    assert types == {"grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"}
    for loss_type in types - {"sapo"}:
        of_type = [case for case in cases if case["options"]["loss_type"] == loss_type]
        assert any(value > 0 for case in of_type for name, value in case["metrics"].items() if "clip" in name)
    losses = {json.dumps(case["options"]): case["loss"] for case in cases}
    for loss_type in ("grpo", "gspo"):  # delta changes something
        plain, ended = (
            next(v for k, v in losses.items() if json.loads(k)["loss_type"] == loss_type and ("delta" in k) == with_it)
            for with_it in (False, True)
        )
        assert plain != ended


def random_batch(config: ObjectiveConfig, seed: int = 0) -> list[Graded]:
    """Three ragged trees; the second has equal rewards, the third lacks some, some branches were cut."""
    generator = torch.Generator().manual_seed(seed)

    def branch(longest: int):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        return -3 * torch.rand(length, generator=generator), 2 * torch.rand(length, generator=generator)

    batch = []
    for place in range(3):
        branches = [(branch(6), [branch(4) for _ in range(2)]) for _ in range(3)]
        rewards = torch.randint(3, (3, 2), generator=generator) / 2
        rewards = torch.full_like(rewards, 0.5) if place == 1 else rewards
        if place == 2:
            rewards[0] = math.nan
            rewards[1, 1] = math.nan
        tree = make_tree(branches, {(0,), (2, 1)})
        batch.append(grade(tree, rewards.tolist(), config, place))
    return batch


COMBINATIONS = (
    {"loss_type": "dapo", "advantage": "rloo", "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "advantage": "mean", "dynamic_sampling": "drop", "answer_weight": 0.5},
    {"loss_type": "grpo", "advantage": "grpo", "credit": "sequence", "mask_truncated_completions": True},
    {"loss_type": "gspo", "advantage": "rloo", "credit": "sequence", "epsilon": 0.05, "entropy_coef": 0.1},
    {"loss_type": "sapo", "advantage": "grpo_ma", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    {"loss_type": "cispo", "advantage": "grpo", "credit": "sequence", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
)


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_branched_trees_equal_nested_loops_in_any_split(options, seed) -> None:
    config = ObjectiveConfig(max_thought_length=7, max_answer_length=5, **options)
    batch = random_batch(config, seed)
    generator = torch.Generator().manual_seed(seed)
    old = [torch.cat([x.logprobs for t in g.scored.tree.thoughts for x in (t, *t.answers)]).double() for g in batch]
    new = [o + 0.3 * torch.randn(len(o), generator=generator, dtype=torch.float64) for o in old]
    entropy = [
        torch.cat([x.entropies for t in g.scored.tree.thoughts for x in (t, *t.answers)]).double() for g in batch
    ]
    slow = [x.clone().requires_grad_() for x in (*new, *entropy)]
    expected = slow_loss(batch, slow[:3], old, slow[3:], config)
    expected.backward()

    minibatch = count_minibatch(batch, config, Processes())
    trees = [segments_of(g, minibatch, config) for g in batch]
    if config.top_entropy_quantile < 1:
        trees = with_top_entropies(batch, trees, config.top_entropy_quantile, Processes())
    num_entropies = count_active(trees, config, Processes())
    for rows in ([[0, 1, 2]], [[2, 0], [1]], [[0], [1], [2]]):
        leaves = [x.clone().requires_grad_() for x in (*new, *entropy)]
        total = 0.0
        for row in rows:
            packed = pack([trees[i] for i in row])
            mine = torch.cat([leaves[i] for i in row]), torch.cat([leaves[3 + i] for i in row])
            result = row_loss(packed, mine[0], None, mine[1], num_entropies, config)
            result.loss.backward()
            total += result.loss.item()
        assert total == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)
        for ours, theirs in zip(leaves, slow, strict=True):
            gradient = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            found = torch.zeros_like(ours) if ours.grad is None else ours.grad
            torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-8)


class Halves(Processes):
    """Two processes whose shares are counted one after the other: gathering returns both shares' items."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "items", [])

    def gather(self, items):
        return [*self.items, *items]


def test_denominators_and_thresholds_are_of_all_processes() -> None:
    for options in COMBINATIONS:
        config = ObjectiveConfig(max_thought_length=7, max_answer_length=5, **options)
        batch = random_batch(config)
        whole = count_minibatch(batch, config, Processes())
        trees = [segments_of(g, whole, config) for g in batch]
        marked = with_top_entropies(batch, trees, 0.5, Processes())
        shares = Halves()
        shares.items.extend(_gathered(lambda p, c=config, b=batch: count_minibatch(b[:1], c, p)))
        assert count_minibatch(batch[1:], config, shares) == whole
        shares = Halves()
        shares.items.extend(_gathered(lambda p, b=batch, t=trees: with_top_entropies(b[:1], t[:1], 0.5, p)))
        rest = with_top_entropies(batch[1:], trees[1:], 0.5, shares)
        for ours, theirs in zip(rest, marked[1:], strict=True):
            assert all(torch.equal(a.factors, b.factors) for a, b in zip(ours[1:], theirs[1:], strict=True))


def _gathered(call) -> list:
    """What a share sends to the others."""
    sent: list = []

    class Sender(Processes):
        def gather(self, items):
            sent.extend(items)
            return items

    call(Sender())
    return sent


def test_lengths_of_cut_sequences_are_zero_where_they_are_masked() -> None:
    sizes = torch.zeros(2), torch.zeros(2)
    one = torch.zeros(1), torch.zeros(1)
    tree = make_tree([(sizes, [one, sizes]), (one, [one, one])], {(0,), (1, 1)})
    plain = ObjectiveConfig()
    assert [x.tolist() for x in trained_lengths(tree, plain)] == [[2, 1], [[1, 2], [1, 1]]]
    masked = replace(plain, mask_truncated_completions=True)
    assert [x.tolist() for x in trained_lengths(tree, masked)] == [[0, 1], [[1, 2], [1, 0]]]
    paths = replace(plain, credit="sequence")
    assert [x.tolist() for x in trained_lengths(tree, paths)] == [[0, 0], [[3, 4], [2, 2]]]
    masked = replace(paths, mask_truncated_completions=True)
    assert [x.tolist() for x in trained_lengths(tree, masked)] == [[0, 0], [[0, 0], [2, 0]]]


def test_a_dropped_prompt_is_in_no_denominator_and_gpg_is_the_same_by_a_factor() -> None:
    """Averages over the prompts that differ: as over all of them, times all over those that differ."""
    config = ObjectiveConfig(advantage="mean", dynamic_sampling="drop", beta=0.1)
    batch = random_batch(config)
    assert [is_counted(g.advantages, config) for g in batch] == [True, False, True]
    assert [teaches(g.advantages, config) for g in batch] == [True, False, True]
    minibatch = count_minibatch(batch, config, Processes())
    assert minibatch.answers.prompts == 2
    dropped, kept = (segments_of(batch[i], minibatch, config) for i in (1, 0))
    assert all(s.weight == 0 for s in dropped)
    every = replace(config, dynamic_sampling="none")
    plain = segments_of(batch[0], count_minibatch(batch, every, Processes()), every)
    assert [s.weight for s in kept] == pytest.approx([s.weight * 3 / 2 for s in plain])


def test_a_penalty_or_a_bonus_teaches_where_advantages_are_zero() -> None:
    flat = random_batch(ObjectiveConfig())[1].advantages
    for options, expected in (
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_in": "reward"}, False),
        ({"entropy_coef": 0.1}, True),
        ({"entropy_coef": 0.1, "dynamic_sampling": "drop"}, False),
    ):
        assert teaches(flat, ObjectiveConfig(**options)) == expected


def test_paths_hold_a_thoughts_tokens_once_for_each_answer() -> None:
    config = ObjectiveConfig(credit="sequence", advantage="rloo")
    batch = random_batch(config)
    row = pack([segments_of(g, count_minibatch(batch, config, Processes()), config) for g in batch])
    sequences = path_sequences(row)
    position = 0
    expected = []
    for graded in batch:
        for i, thought in enumerate(graded.scored.tree.thoughts):
            own = list(range(position, position + len(thought.ids)))
            position += len(own)
            for j, answer in enumerate(thought.answers):
                rest = list(range(position, position + len(answer.ids)))
                position += len(rest)
                expected.append((own + rest, float(graded.advantages.answers[i, j])))
    found = [
        (sequences.index[sequences.sequence == s].tolist(), float(sequences.advantages[sequences.sequence == s][0]))
        for s in sequences.sequence.unique()
    ]
    assert found == expected
    for s in sequences.sequence.unique():
        assert len(sequences.weights[sequences.sequence == s].unique()) == 1
    # without the weights of their own tokens answers are left out: what shows the parts of a gradient
    without_answers = [
        [
            replace(s, weight=0.0) if s.path_weight > 0 else s
            for s in segments_of(g, count_minibatch(batch, config, Processes()), config)
        ]
        for g in batch
    ]
    part = path_sequences(pack(without_answers))
    answers = of_answers(row)[part.index]
    assert not part.weights[answers].any()
    assert torch.equal(part.weights[~answers], sequences.weights[~answers])
