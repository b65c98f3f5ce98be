"""pass@k and votes: equal to brute force over all draws, unbiased, and told apart where answers share a thought."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_grpo.evaluation.measure import intervals, summarise
from vlm_grpo.evaluation.pass_at_k import majority, pass_at_k, sizes, tree_pass_at_k
from vlm_grpo.evaluation.predictions import Prediction
from vlm_grpo.task import Reward, Sample, TaskAdapter

GRIDS = st.integers(1, 3).flatmap(
    lambda answers: st.lists(st.lists(st.booleans(), min_size=answers, max_size=answers), min_size=1, max_size=5)
)


def every_draw_of_thoughts(correct: list[list[bool]], k: int) -> Fraction:
    """k different thoughts, then one answer of each: all ways, equally likely."""
    hits = total = 0
    for thoughts in combinations(correct, k):
        for answers in product(*thoughts):
            hits, total = hits + any(answers), total + 1
    return Fraction(hits, total)


def every_draw_of_answers(correct: list[list[bool]], k: int) -> Fraction:
    """k different answers of the whole tree."""
    draws = list(combinations([answer for row in correct for answer in row], k))
    return Fraction(sum(any(draw) for draw in draws), len(draws))


@pytest.mark.slow
@given(GRIDS)
@settings(max_examples=400, deadline=None)
def test_estimates_are_the_means_over_all_draws(correct: list[list[bool]]) -> None:
    for k in range(1, len(correct) + 1):
        assert pass_at_k(correct, k) == pytest.approx(float(every_draw_of_thoughts(correct, k)), abs=1e-12)
    for k in range(1, len(correct) * len(correct[0]) + 1):
        assert tree_pass_at_k(correct, k) == pytest.approx(float(every_draw_of_answers(correct, k)), abs=1e-12)


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_with_one_answer_per_thought_both_are_the_published_estimator(correct: list[bool]) -> None:
    """arXiv 2107.03374 computes 1 − ∏ (1 − k / i) over i from n − c + 1 to n, and 1 where n − c < k."""
    n, c = len(correct), sum(correct)
    rows = [[one] for one in correct]
    for k in range(1, n + 1):
        published = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(rows, k) == pytest.approx(published, abs=1e-9)
        assert tree_pass_at_k(rows, k) == pytest.approx(published, abs=1e-9)


@pytest.mark.slow
def test_pass_at_k_is_unbiased_where_thoughts_differ_and_tree_pass_is_below_it() -> None:
    """A thought is good with 0.4, and its answers are then right with 0.9, else with 0.1: right in all with 0.42."""
    random = np.random.default_rng(0)
    found, of_tree = [], []
    for _ in range(1500):
        chances = np.where(random.random(6) < 0.4, 0.9, 0.1)
        correct = (random.random((6, 4)) < chances[:, None]).tolist()
        found.append(pass_at_k(correct, 3))
        of_tree.append(tree_pass_at_k(correct, 3))
    truth = 1 - (1 - 0.42) ** 3
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - truth) < 3 * error
    assert np.mean(of_tree) < truth - 5 * error


def test_many_answers_lose_no_digits() -> None:
    correct = [[i == 0] for i in range(256)]
    for k in sizes(256):
        assert pass_at_k(correct, k) == pytest.approx(k / 256, rel=1e-9)
        assert tree_pass_at_k(correct, k) == k / 256
    assert pass_at_k([[False]] * 200, 100) == 0 and pass_at_k([[True]] * 200, 100) == 1


def test_reported_sizes() -> None:
    assert [sizes(n) for n in (1, 2, 3, 4, 10, 16)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8, 10],
        [1, 2, 4, 8, 16],
    ]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_majority_is_the_first_of_the_most_frequent(votes: list[str]) -> None:
    won = votes[majority(votes)]
    most = max(Counter(votes).values())
    assert votes.count(won) == most
    assert majority(votes) == min(i for i, vote in enumerate(votes) if votes.count(vote) == most)


class Words(TaskAdapter):
    """An answer is worth the share of its letters that are right; `hit` is 1 where it is the word itself."""

    headline = "hit"

    def samples(self, split: str) -> list[Sample]:
        return [Sample(word, [], "?", word) for word in ("cat", "dog", "owl")]

    def reward(self, sample: Sample, answer: str) -> Reward:
        word = answer.strip().lower()
        return Reward(len(set(word) & set(sample.target)) / 3, {"hit": float(word == sample.target)})

    def reference_answer(self, sample: Sample) -> str:
        return sample.target


def drawn(task: TaskAdapter, answers: dict[str, list[list[str | None]]]) -> list[Prediction]:
    """Predictions of K × M answers to each word; None: an answer without a reward."""
    predictions = []
    for sample in task.samples("val"):
        for (i, j), answer in np.ndenumerate(np.array(answers[sample.id], dtype=object)):
            reward = None if answer is None else task.reward(sample, answer)
            value, parts = (None, {}) if reward is None else (reward.value, reward.parts)
            predictions.append(Prediction(sample.id, answer or "", value, parts, "", "", int(i), int(j)))
    return predictions


def test_metrics_of_several_answers_by_hand() -> None:
    task = Words()
    answers = {
        "cat": [["cat", "car"], ["Car ", "dog"]],  # one of 4 right; firsts: cat, car; of all: car
        "dog": [["owl", "owl"], ["dog", " DOG"]],  # two of one thought; firsts: owl, dog (a tie); of all: owl (a tie)
        "owl": [["owl", "OWL"], ["owl", None]],  # three right, one without a reward
    }
    evaluation = summarise(task, task.samples("val"), drawn(task, answers))
    metrics = evaluation.metrics
    # Over first, second … answers: cat 1/3 … of each draw, then the mean of the four draws
    hits = np.array([[1, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, np.nan]])
    assert metrics["hit"] == pytest.approx(np.nanmean(hits, axis=0).mean())
    assert metrics["pass@1"] == pytest.approx((1 / 4 + 1 / 2 + 3 / 4) / 3)
    assert metrics["pass@2"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert metrics["tree_pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 1) / 3)
    assert metrics["tree_pass@4"] == 1
    assert metrics["maj@2"] == pytest.approx((1 + 0 + 1) / 3)  # ties: the first
    assert metrics["tree_maj@4"] == pytest.approx((0 + 0 + 1) / 3)
    assert metrics["tree_maj_reward@4"] == pytest.approx((2 / 3 + 1 / 3 + 1) / 3)
    assert (metrics["num_samples"], metrics["num_without_reward"]) == (3, 1)
    assert "tree_pass@1" not in metrics and "maj@1" not in metrics
    found, _ = intervals(task, task.samples("val"), evaluation, resamples=200, seed=0)
    assert {"hit", "reward", "pass@1", "pass@2", "tree_pass@4", "maj@2", "tree_maj@4"} <= set(found)
    assert found["tree_pass@4"].low == found["tree_pass@4"].high == 1


def test_one_answer_each_adds_no_such_metric_and_one_thought_only_those_of_the_tree() -> None:
    task = Words()
    alone = summarise(task, task.samples("val"), drawn(task, {w: [["cat"]] for w in ("cat", "dog", "owl")}))
    assert set(alone.metrics) == {"reward", "hit", "num_samples"}
    thought = summarise(task, task.samples("val"), drawn(task, {w: [["cat", "owl"]] for w in ("cat", "dog", "owl")}))
    several = {name for name in thought.metrics if "@" in name}
    assert several == {"pass@1", "tree_pass@2", "tree_maj@2", "tree_maj_reward@2"}
    assert thought.metrics["tree_pass@2"] == pytest.approx(2 / 3)


def test_a_task_may_say_itself_what_is_correct_and_what_is_equal() -> None:
    class Lenient(Words):
        def is_correct(self, reward: Reward) -> bool:
            return reward.value >= 2 / 3

        def normalised(self, sample: Sample, answer: str) -> str:
            return answer[:1]

    answers: dict[str, list[list[str | None]]] = {
        "cat": [["dog"], ["car"], ["cat"]],
        "dog": [["dot"], ["cat"], ["owl"]],
        "owl": [["x"], ["y"], ["yo"]],
    }
    metrics = summarise(Lenient(), Words().samples("val"), drawn(Words(), answers)).metrics
    assert metrics["pass@1"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert metrics["maj@3"] == pytest.approx(2 / 3)  # "car" wins for c, "dot" the tie, "y" for y
    assert metrics["maj_reward@3"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
