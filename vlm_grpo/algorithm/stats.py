"""Records of a step's rollouts, one for each answer, and metrics over the prompts of all processes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlm_grpo.algorithm.advantage import Advantages
from vlm_grpo.common.processes import Processes
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.tree.types import RolloutTree, Thought


@dataclass(frozen=True)
class RolloutRow:
    """One answer of a step. `answer` has original-image coordinates, `model_answer` is the text of the model."""

    sample_id: str
    prompt: str
    thought: str
    answer: str
    model_answer: str
    reward: float | None  # None: the answer has no reward
    thought_advantage: float
    answer_advantage: float
    parts: Mapping[str, float] = field(default_factory=dict)
    task: str = ""


def rollout_rows(trees: Sequence[tuple[ScoredTree, Advantages]]) -> list[RolloutRow]:
    """One row for each answer, in the order of the trees and of their thoughts."""
    return [
        _rollout_row(scored, advantages, i, j)
        for scored, advantages in trees
        for i, thought in enumerate(scored.tree.thoughts)
        for j in range(len(thought.answers))
    ]


def _rollout_row(scored: ScoredTree, advantages: Advantages, i: int, j: int) -> RolloutRow:
    prompt, thought, reward = scored.tree.prompt, scored.tree.thoughts[i], scored.rewards[i][j]
    return RolloutRow(
        sample_id=prompt.sample.id,
        prompt=prompt.text,
        thought=thought.text,
        answer=scored.answers[i][j],
        model_answer=thought.answers[j].text,
        reward=None if reward is None else reward.value,
        thought_advantage=float(advantages.thoughts[i]),
        answer_advantage=float(advantages.answers[i, j]),
        parts={} if reward is None else dict(reward.parts),
        task=prompt.sample.task,
    )


@dataclass(frozen=True)
class TreeFacts:
    """The numbers of one tree that the metrics need; small enough to send to every process."""

    task: str
    rewards: list[float]  # of the answers that have a reward
    parts: dict[str, list[float]]
    thought_lengths: list[int]  # of whole thoughts
    answer_lengths: list[int]
    num_tokens: int  # sampled
    thoughts_clipped: int  # truncated at max_thought_length
    answers_clipped: int
    entropy: float  # sum over sampled tokens
    thoughts_zero_std: bool
    answers_zero_std: bool
    between_thoughts: float
    within_thoughts: float


def tree_facts(scored: ScoredTree, advantages: Advantages) -> TreeFacts:
    """The facts of one tree."""
    thoughts = scored.tree.thoughts
    answers = [a for t in thoughts for a in t.answers]
    rewards = [r for row in scored.rewards for r in row if r is not None]
    parts: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            parts.setdefault(name, []).append(value)
    return TreeFacts(
        task=scored.tree.prompt.sample.task,
        rewards=[r.value for r in rewards],
        parts=parts,
        thought_lengths=[sum(len(p.ids) for p in pieces) for pieces in whole_thoughts(scored.tree)],
        answer_lengths=[len(a.ids) for a in answers],
        num_tokens=scored.tree.num_sampled,
        thoughts_clipped=sum(not t.closed for t in thoughts),
        answers_clipped=sum(not a.closed for a in answers),
        entropy=float(sum(x.entropies.sum() for x in (*thoughts, *answers))),
        thoughts_zero_std=advantages.thoughts_zero_std,
        answers_zero_std=advantages.answers_zero_std,
        between_thoughts=advantages.stats.between_thoughts,
        within_thoughts=advantages.stats.within_thoughts,
    )


def whole_thoughts(tree: RolloutTree) -> list[tuple[Thought, ...]]:
    """The pieces of each thought that has answers."""
    return [tree.pieces(i) for i, thought in enumerate(tree.thoughts) if thought.answers]


def step_metrics(
    trees: Sequence[tuple[ScoredTree, Advantages]], processes: Processes, tasks: Sequence[str] = ()
) -> dict[str, float]:
    """Means over answers, thoughts or prompts of all processes, as each name says; NaN where there are none.

    With several `tasks` the metrics of OF_EACH_TASK and the reward parts are given for each task too, as `NAME/{task}`.
    """
    facts = processes.gather([tree_facts(scored, advantages) for scored, advantages in trees])
    metrics = _means(facts)
    if len(tasks) < 2:
        return metrics | _parts(facts, "rewards")
    for task in tasks:
        own = [f for f in facts if f.task == task]
        of_task = _means(own)
        metrics |= {f"{name}/{task}": of_task[name] for name in OF_EACH_TASK}
        metrics |= _parts(own, f"rewards/{task}")
    return metrics


OF_EACH_TASK = (
    "reward",
    "reward_std",
    "reward_between_thoughts",
    "reward_within_thoughts",
    "frac_reward_zero_std",
    "frac_thought_zero_std",
    "answers_without_reward",
    "thoughts/mean_length",
    "answers/mean_length",
    "num_prompts",
)
"""Metrics that a run of several tasks also logs for each task."""


def _means(facts: Sequence[TreeFacts]) -> dict[str, float]:
    rewards = [r for f in facts for r in f.rewards]
    thought_lengths = [n for f in facts for n in f.thought_lengths]
    answer_lengths = [n for f in facts for n in f.answer_lengths]
    tokens = sum(f.num_tokens for f in facts)
    between = _mean([f.between_thoughts for f in facts if f.rewards])
    within = _mean([f.within_thoughts for f in facts if f.rewards])
    return {
        "reward": _mean(rewards),
        "reward_std": _mean([statistics.pstdev(f.rewards) for f in facts if f.rewards]),
        "reward_between_thoughts": between,
        "reward_within_thoughts": within,
        "reward_variance_ratio": within / between if between > 0 else math.nan,
        "frac_reward_zero_std": _mean([f.answers_zero_std for f in facts]),
        "frac_thought_zero_std": _mean([f.thoughts_zero_std for f in facts]),
        "answers_without_reward": float(len(answer_lengths) - len(rewards)),
        "thoughts/mean_length": _mean(thought_lengths),
        "answers/mean_length": _mean(answer_lengths),
        "thoughts/clipped_ratio": sum(f.thoughts_clipped for f in facts) / max(1, len(thought_lengths)),
        "answers/clipped_ratio": sum(f.answers_clipped for f in facts) / max(1, len(answer_lengths)),
        "entropy": sum(f.entropy for f in facts) / max(1, tokens),
        "num_tokens": float(tokens),
        "num_prompts": float(len(facts)),
    }


def _parts(facts: Sequence[TreeFacts], above: str) -> dict[str, float]:
    """Mean and standard deviation of each reward part, over the rewards that have it, named `{above}/PART/…`."""
    metrics = {}
    for name in sorted({name for f in facts for name in f.parts}):
        values = [v for f in facts for v in f.parts.get(name, [])]
        metrics[f"{above}/{name}/mean"] = _mean(values)
        metrics[f"{above}/{name}/std"] = statistics.pstdev(values)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def resample_metrics(
    kept: Sequence[ScoredTree], replaced: Sequence[ScoredTree], processes: Processes
) -> dict[str, float]:
    """Metrics of dynamic_sampling=resample: the number of trees it replaced, their tokens, and `reward_sampled`, the
    mean reward of all trees that were grown. All other metrics cover the kept trees only.
    """
    own = [
        float(len(replaced)),
        float(sum(s.tree.num_sampled for s in replaced)),
        *_reward_sum([*kept, *replaced]),
    ]
    count, tokens, total, rewards = (math.fsum(column) for column in zip(*processes.gather([own]), strict=True))
    mean = total / rewards if rewards else math.nan
    return {"resampled_prompts": count, "resampled_tokens": tokens, "reward_sampled": mean}


def branch_metrics(trees: Sequence[RolloutTree], processes: Processes) -> dict[str, float]:
    """Metrics of branched thoughts (num_levels above 2): `thoughts/branched_ratio` is the share of the thoughts at the
    prompt that were branched, `thoughts/mean_pieces` the mean number of pieces in a whole thought.
    """
    own = [0.0, 0.0, 0.0, 0.0]
    for tree in trees:
        whole = whole_thoughts(tree)
        first = [thought for thought in tree.thoughts if thought.parent < 0]
        own[0] += sum(not thought.answers for thought in first)
        own[1] += len(first)
        own[2] += sum(map(len, whole))
        own[3] += len(whole)
    branched, first, pieces, whole = (sum(column) for column in zip(*processes.gather([own]), strict=True))
    return {"thoughts/branched_ratio": branched / max(1.0, first), "thoughts/mean_pieces": pieces / max(1.0, whole)}


def _reward_sum(trees: Sequence[ScoredTree]) -> tuple[float, float]:
    values = [r.value for s in trees for row in s.rewards for r in row if r is not None]
    return math.fsum(values), float(len(values))
