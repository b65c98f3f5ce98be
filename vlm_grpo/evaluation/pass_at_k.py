"""What several answers to one question are worth: pass@k and majority votes. Letters: K thoughts, M answers of each.

The answers of one thought share it, so that K·M answers are not K·M independent ones. Two readings of pass@k are given:

    pass@k       k thoughts are drawn with one answer each: the usual pass@k of k independent samples
    tree_pass@k  k of the tree's K·M answers are drawn: that of this way of sampling, at most as high on average

With M = 1 they are equal.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb


def sizes(most: int) -> list[int]:
    """The k that are reported: powers of two, and the most there is.

    >>> sizes(6), sizes(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    return sorted({2**i for i in range(most.bit_length())} | {most})


def pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """The unbiased estimate of the chance that one of k independent answers is correct, from K × M answers.

    With the share f_t of thought t's answers that fail: 1 − mean over the k-subsets S of thoughts of ∏_{t ∈ S} f_t. The
    sum over the subsets is the k-th elementary symmetric polynomial of the f_t. For M = 1 this is the estimator of
    arXiv 2107.03374, 1 − C(n−c, k) / C(n, k).

    >>> pass_at_k([[True, False], [False, False]], 1), pass_at_k([[True, False], [False, False]], 2)
    (0.25, 0.5)
    """
    assert 1 <= k <= len(correct), f"k is {k}, thoughts are {len(correct)}"
    sums = [1.0] + [0.0] * k  # of the products over subsets of 0, 1, … k thoughts seen so far
    for answers in correct:
        fails = 1 - sum(answers) / len(answers)
        for size in range(k, 0, -1):
            sums[size] += fails * sums[size - 1]
    return max(0.0, 1 - sums[k] / comb(len(correct), k))


def tree_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """The chance that one of k different answers drawn from all K·M is correct: 1 − C(n−c, k) / C(n, k).

    >>> tree_pass_at_k([[True, False], [False, False]], 2)
    0.5
    """
    answers = [answer for of_thought in correct for answer in of_thought]
    assert 1 <= k <= len(answers), f"k is {k}, answers are {len(answers)}"
    return 1 - comb(len(answers) - sum(answers), k) / comb(len(answers), k)


def majority(votes: Sequence[str]) -> int:
    """The place of the first vote for what most vote for; of equally many, what was voted for first.

    >>> majority(["b", "a", "a", "b", "c"])
    0
    """
    counts = Counter(votes)
    return votes.index(max(counts, key=lambda vote: counts[vote]))
