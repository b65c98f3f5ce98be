"""What the run shows of its gradient, against hand-made cases; and it changes nothing.

Letters: B trees, n answers of a tree, D numbers of a weight, K thoughts, M answers of each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import families
from support.two_ranks import CONFIG, LOOK, graded_trees, make_trainer
from torch import Tensor, nn

from vlm_grpo.algorithm import diagnostics
from vlm_grpo.algorithm.advantage import AdvantageConfig, group_advantages
from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.diagnostics import (
    SpikeScore,
    effective_rank,
    matching_layers,
    measure_gradient,
    sparsity,
    thought_advantage_variance,
)
from vlm_grpo.algorithm.trainer import StepConfig, Trainer
from vlm_grpo.common.config import layered_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.vlm import VLM

LAYERS = LOOK.layer_patterns


# Matrices


def entropy_of_svd(matrix: np.ndarray) -> float:
    values = np.linalg.svd(matrix, compute_uv=False)
    share = values[values > 1e-9] / values[values > 1e-9].sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def test_effective_rank_of_known_matrices() -> None:
    assert effective_rank(torch.eye(5)) == 5
    assert effective_rank(torch.outer(torch.arange(1.0, 4.0), torch.ones(7))) == 1
    assert effective_rank(torch.zeros(3, 4)) == 0
    # Singular values 3 and 1: shares 3/4 and 1/4, so exp(-3/4 ln 3/4 - 1/4 ln 1/4)
    assert effective_rank(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])) == pytest.approx(4 / 3**0.75)


@pytest.mark.parametrize("shape", [(1, 9), (4, 30), (30, 4), (8, 8)])
def test_effective_rank_is_that_of_the_singular_values(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "CHUNK", 7)  # the last chunk is a smaller one
    for scale in (1e-12, 1.0, 1e6):
        matrix = torch.randn(shape) * scale
        assert effective_rank(matrix) == pytest.approx(entropy_of_svd(matrix.double().numpy() / scale), rel=1e-6)


def test_sparsity_of_known_matrices() -> None:
    assert sparsity(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -3.0]])) == 0.75
    assert sparsity(torch.ones(3, 4)) == 0
    assert sparsity(torch.zeros(3, 4)) == 1
    # Root mean square 1/2: a gap is at most 1/2000, whatever the scale
    rows = torch.tensor([[1.0, 0.00049], [0.00051, 0.0]])
    assert sparsity(rows) == sparsity(1e-9 * rows) == 0.5


# Two classes of answers: what binary rewards teach (arXiv 2606.29238)


def tree_gradient(scores: Tensor, rewards: Tensor, config: AdvantageConfig) -> Tensor:
    """Mean of advantage times score vector over the n answers, one thought each."""
    advantages = group_advantages(rewards[:, None], config).answers[:, 0]
    return (advantages[:, None] * scores).mean(0)


def test_gradient_of_binary_rewards_is_the_contrast_of_two_class_means() -> None:
    config = AdvantageConfig(scale_rewards="none")
    for n in (2, 3, 8, 33):
        scores, rewards = torch.randn(n, 11, dtype=torch.float64), torch.randint(2, (n,)).double()
        rewards[:2] = torch.tensor([0.0, 1.0])
        rate = rewards.mean()
        contrast = scores[rewards == 1].mean(0) - scores[rewards == 0].mean(0)
        torch.testing.assert_close(tree_gradient(scores, rewards, config), rate * (1 - rate) * contrast)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_rank_of_two_class_trees_is_at_most_two_for_any_size(n: int) -> None:
    """Right answers have one score vector, wrong ones another: trees differ in how many of each they have."""
    right, wrong = torch.randn(2, 40, dtype=torch.float64)
    rewards = torch.stack([(torch.arange(n) < 1 + i % (n - 1)).double() for i in range(16)])  # (B, n)
    scores = torch.where(rewards[..., None] > 0, right, wrong)  # (B, n, D)
    for config in (AdvantageConfig(), AdvantageConfig(scale_rewards="none")):
        rows = torch.stack([tree_gradient(s, r, config) for s, r in zip(scores, rewards, strict=True)])
        assert effective_rank(rows) == pytest.approx(1, abs=1e-6), "a baseline leaves the one contrast"
    without_baseline = (rewards[..., None] * scores + 0.3 * scores).mean(1)
    assert effective_rank(without_baseline) <= 2 + 1e-9
    if n > 2:
        assert effective_rank(without_baseline) > 1.01


class TwoAnswers(nn.Module):
    """A policy over V answers to a question of H numbers: its only weight is a matrix (V, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5, bias=False, dtype=torch.float64)


def measure(
    model: nn.Module, losses: Sequence[tuple[Tensor, Tensor]], num_trees: int, layers: Sequence[str] = ("*",)
) -> dict[str, float]:
    """`losses`: of each tree, the term of its thoughts and that of its answers."""
    named = list(model.named_parameters())

    def backward(index: int, of_answers: bool) -> None:
        losses[index][of_answers].backward()

    return measure_gradient(named, matching_layers(named, layers), len(losses), num_trees, backward, Processes())


@pytest.mark.parametrize(("kinds", "rank"), [(1, 1), (2, 2)])
def test_measured_rank_of_two_class_trees(kinds: int, rank: int) -> None:
    """Every tree has right answers 0 and wrong answers 1 to one of two questions; two in eight have equal rewards."""
    model = TwoAnswers()
    questions = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64)).Q.T  # two orthogonal ones
    losses = []
    for index in range(6):
        rewards = (torch.arange(8) < index + 1).double()
        advantages = group_advantages(rewards[:, None], AdvantageConfig()).answers[:, 0]
        logprobs = model.head(questions[index % kinds]).log_softmax(-1)
        answers = -(advantages * logprobs[(rewards == 0).long()]).mean()
        losses.append((0.0 * answers, answers))
    # The two terms of a tree are differentiated one after the other
    losses = [(0.0 * model.head.weight.sum(), answers) for _, answers in losses]
    found = measure(model, losses, num_trees=8)
    # The score of y is (e_y - softmax) h^T, so a contrast is (e_0 - e_1) h^T: of rank one, zero in three rows of five
    assert found["grad_matrix_rank/head.weight"] == pytest.approx(1, abs=1e-6)
    assert found["grad_rank/head.weight"] <= rank + 1e-6
    if rank == 1:
        assert found["grad_rank/head.weight"] == pytest.approx(1, abs=1e-6)
    else:
        assert found["grad_rank/head.weight"] > 1.9
    assert found["grad_sparsity/head.weight"] == pytest.approx(1 - 6 / 8 * 2 / 5)
    assert found["grad_norm/thoughts"] == 0 and math.isnan(found["grad_cosine"])


# Two terms


@pytest.mark.parametrize(
    ("thoughts", "answers", "cosine"),
    [((3.0, 4.0), (6.0, 8.0), 1.0), ((3.0, 4.0), (-8.0, 6.0), 0.0), ((3.0, 4.0), (-3.0, -4.0), -1.0)],
)
def test_norms_and_cosine_of_known_gradients(
    thoughts: tuple[float, float], answers: tuple[float, float], cosine: float
) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("a", "b", "untouched")})
    given = [
        tuple(0.5 * (term[0] * model["a"] + term[1] * model["b"]) for term in (thoughts, answers)) for _ in range(2)
    ]
    model["a"].grad, model["b"].grad = torch.tensor(7.0), None
    kept = model["a"].grad
    found = measure(model, given, num_trees=2, layers=())
    assert found["grad_norm/thoughts"] == math.hypot(*thoughts)
    assert found["grad_norm/answers"] == math.hypot(*answers)
    assert found["grad_cosine"] == pytest.approx(cosine, abs=1e-12)
    assert model["a"].grad is kept and float(kept) == 7 and model["b"].grad is None


def test_gradients_are_put_back_also_when_a_backward_fails() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = kept = torch.ones(2, 2)

    def backward(index: int, of_answers: bool) -> None:
        model.weight.grad = torch.zeros(2, 2)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_gradient([("weight", model.weight)], {}, 1, 1, backward, Processes())
    assert model.weight.grad is kept


# Spikes


def scores(norms: Sequence[float]) -> list[float]:
    spikes = SpikeScore()
    return [spikes.add(norm) for norm in norms]


def test_planted_spike_is_found_and_counted() -> None:
    spikes = SpikeScore()
    for _ in range(20):
        assert spikes.add(2.0) == 1.0
    assert spikes.add(200.0) == 200 * 21 / (20 * 2 + 200) == 17.5
    assert spikes.share == 1 / 21
    assert spikes.add(2.0) < 1
    assert spikes.share == 1 / 22


def test_step_without_a_finite_norm_has_no_score() -> None:
    spikes = SpikeScore()
    spikes.add(1.0)
    assert math.isnan(spikes.add(math.inf)) and math.isnan(spikes.add(math.nan))
    assert (spikes.add(3.0), spikes.count) == (1.5, 2)
    assert scores([0.0, 0.0, 1.0]) == [0.0, 0.0, 3.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_spike_score_is_the_norm_over_the_mean_so_far(norms: list[float]) -> None:
    means = np.cumsum(norms) / np.arange(1, len(norms) + 1)
    expected = [norm / mean if mean > 0 else 0.0 for norm, mean in zip(norms, means, strict=True)]
    assert scores(norms) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert all(score <= t + 1 + 1e-9 for t, score in enumerate(scores(norms)))


# The variance of a thought's advantage (arXiv 2509.24494)

# Monte-Carlo values for thoughts with success probabilities Beta(2, 2) and Bernoulli answers, by (K, M)
TABLE = {(16, 1): 0.81, (16, 4): 0.54, (16, 16): 0.21, (16, 64): 0.055}
TABLE |= {(64, 1): 0.82, (64, 4): 0.51, (64, 16): 0.20, (64, 64): 0.056}


def simulated_variance(rates: np.ndarray, num_answers: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Of each thought's advantage, with Bernoulli answers of these rates (K,)."""
    values = generator.binomial(num_answers, rates, (count, len(rates))) / num_answers
    spread = values.std(-1, keepdims=True)
    return ((values - values.mean(-1, keepdims=True)) / np.where(spread > 0, spread, 1)).var(0)


def first_order(rates: np.ndarray, num_answers: int) -> np.ndarray:
    means = torch.from_numpy(rates)
    return thought_advantage_variance(means, means * (1 - means), num_answers).numpy()


@pytest.mark.parametrize("num_thoughts", [4, 16])
def test_variance_formula_is_that_of_simulated_advantages(num_thoughts: int) -> None:
    rates = np.linspace(0.1, 0.9, num_thoughts) ** 1.2
    generator = np.random.default_rng(0)
    # It is of first order in 1/M: up to 16% too large at 16 answers, 3% at 128
    for num_answers, tolerance in ((16, 0.2), (128, 0.05)):
        simulated = simulated_variance(rates, num_answers, 40_000, generator)
        np.testing.assert_allclose(first_order(rates, num_answers), simulated, rtol=tolerance)
    np.testing.assert_allclose(first_order(rates, 10), 16 * first_order(rates, 160), rtol=1e-12)


@pytest.mark.parametrize(("num_thoughts", "num_answers"), TABLE)
def test_variances_of_the_known_table(num_thoughts: int, num_answers: int) -> None:
    """Many thoughts alone: with four of them the mean over draws of thoughts is that of the few that lie close."""
    generator = np.random.default_rng(0)
    draws = [generator.beta(2, 2, num_thoughts) for _ in range(200)]
    simulated = np.mean([simulated_variance(rates, num_answers, 200, generator).mean() for rates in draws])
    assert simulated == pytest.approx(TABLE[num_thoughts, num_answers], rel=0.15)
    formula = np.mean([first_order(rates, num_answers).mean() for rates in draws])
    if num_answers >= 16:
        assert simulated < formula < (1.35 if num_answers == 16 else 1.15) * simulated
    else:
        assert formula > 1, "which no standardised value can have: for few answers the first order says nothing"


# Within the trainer


@pytest.fixture(scope="module")
def vlm() -> VLM:
    vlm = VLM(families.load_model("qwen2_5_vl", torch.float64), families.load_processor("qwen2_5_vl"))
    vlm.keep_reference()
    return vlm


def gradient_of(vlm: VLM, config: StepConfig, trees: Sequence, scale: float = 1.0) -> dict[str, Tensor]:
    """Of the trees as one minibatch, times `scale`."""
    vlm.model.zero_grad(set_to_none=True)
    trainer = make_trainer(vlm, config)
    trainer.backward(trees, on_policy=True)
    found = {name: scale * p.grad for name, p in trainer.optimizer.named if p.grad is not None}
    vlm.model.zero_grad(set_to_none=True)
    return found


def norm(gradient: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))


def test_terms_of_the_trainer_s_gradient_and_trees_of_its_layers(vlm: VLM) -> None:
    graded = graded_trees(vlm)
    unrewarded = replace(
        graded[0], advantages=group_advantages(torch.full((3, 2), torch.nan), CONFIG), place=len(graded)
    )
    trainer = make_trainer(vlm, LOOK)
    found = trainer.diagnose([*graded, unrewarded])
    assert all(weight.grad is None for weight in vlm.model.parameters())

    whole = gradient_of(vlm, CONFIG, graded)
    thoughts = gradient_of(vlm, replace(CONFIG, answer_weight=0.0), graded)
    answers = {name: whole[name] - thoughts[name] for name in whole}
    product = sum(float((thoughts[name] * answers[name]).sum()) for name in whole)
    assert found["grad_norm/thoughts"] == pytest.approx(norm(thoughts), rel=1e-6)  # weights are float32
    assert found["grad_norm/answers"] == pytest.approx(norm(answers), rel=1e-6)
    assert found["grad_cosine"] == pytest.approx(product / norm(thoughts) / norm(answers), abs=1e-6)

    of_trees = [gradient_of(vlm, CONFIG, [tree], 1 / len(graded)) for tree in graded]
    layers = [name for name in whole if name.endswith(tuple(pattern[1:] for pattern in LAYERS))]
    assert len(layers) == 2 and "visual" not in "".join(layers)
    for name in layers:
        matrices = [gradient[name] for gradient in of_trees]
        rows = torch.stack([*(m.flatten() for m in matrices), torch.zeros(matrices[0].numel())])
        assert found[f"grad_rank/{name}"] == pytest.approx(entropy_of_svd(rows.numpy() / norm(whole)), rel=1e-6)
        mean = np.mean([entropy_of_svd(m.numpy() / norm(whole)) for m in matrices])
        assert found[f"grad_matrix_rank/{name}"] == pytest.approx(mean, rel=1e-5)
        assert found[f"grad_sparsity/{name}"] >= 1 / len(rows), "the row of the tree without rewards"
    torch.testing.assert_close(sum(g[layers[0]] for g in of_trees), whole[layers[0]])


@pytest.mark.parametrize("tower", ["frozen", "trains"])
def test_looking_changes_no_weight_and_no_other_metric(tower: str) -> None:
    runs = []
    for every in (0, 1):
        vlm = VLM(families.load_model("qwen2_5_vl"), families.load_processor("qwen2_5_vl"))
        for name, weight in vlm.model.named_parameters():
            weight.requires_grad_(tower == "trains" or not name.startswith(vlm.family.vision_modules))
        layers = LAYERS if every else []
        config = replace(CONFIG, beta=0.0, learning_rate=0.01, num_iterations=2, prompts_per_minibatch=2)
        trainer = make_trainer(vlm, replace(config, diagnostics_every=every, diagnostics_layers=layers))
        runs.append((vlm, two_steps(trainer)))
    (plain, without), (looked, with_them) = runs
    weights = zip(plain.model.parameters(), looked.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights)
    for before, after in zip(without, with_them, strict=True):
        new = {name for name in after if name not in before}
        assert new == {
            *("time/diagnostics", "grad_norm/thoughts", "grad_norm/answers", "grad_cosine"),
            *(f"grad_{kind}/{name}" for kind in ("rank", "matrix_rank", "sparsity") for name in trainer.layers),
        }
        same = [name for name in before if "time" not in name and not math.isnan(before[name])]
        assert {name: before[name] for name in same} == {name: after[name] for name in same}
        assert after["grad_norm/thoughts"] > 0 and after["grad_norm/answers"] > 0
    assert any(not torch.equal(p, q) for p, q in zip(plain.model.parameters(), fresh().parameters(), strict=True))


def fresh() -> nn.Module:
    return families.load_model("qwen2_5_vl")


def two_steps(trainer: Trainer) -> list[dict[str, float]]:
    """Metrics of two steps on pictures and texts, whose answers all earn something else."""
    [task] = trainer.tasks.values()
    task.kinds = "iti"
    return [trainer.step(number, task.samples("train")).metrics for number in (1, 2)]


def test_every_so_many_steps(vlm: VLM) -> None:
    trainer = make_trainer(vlm, replace(LOOK, diagnostics_every=2, learning_rate=0.0, beta=0.0))
    first, second = two_steps(trainer)
    assert "grad_cosine" not in first and "grad_cosine" in second
    assert first["grad_spike_score"] == 1.0
    expected = second["grad_norm"] / ((first["grad_norm"] + second["grad_norm"]) / 2)
    assert second["grad_spike_score"] == pytest.approx(expected)
    assert second["grad_spike_share"] == 0
    assert second["reward_variance_ratio"] == pytest.approx(
        second["reward_within_thoughts"] / second["reward_between_thoughts"]
    )


# Options


def test_layers_that_match_nothing_are_an_error_with_the_nearest_name(vlm: VLM) -> None:
    with pytest.raises(UserError, match=r"'\*down_prj\.weight' matches none of the \d+ matrices.*weight"):
        make_trainer(vlm, replace(LOOK, diagnostics_layers="*down_prj.weight"))
    with pytest.raises(UserError, match="matches none"):
        matching_layers([("norm.weight", nn.Parameter(torch.ones(3)))], ["norm.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diagnostics_every": -1}, "diagnostics_every=-1: must be at least 0"),
        ({"diagnostics_layers": "*q_proj*"}, "never looked at: set diagnostics_every"),
        ({"diagnostics_every": 1, "diagnostics_layers": [""]}, "names or patterns"),
    ],
)
def test_options_without_meaning_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(layered_config(StepConfig, None, [(options, "here")]))
