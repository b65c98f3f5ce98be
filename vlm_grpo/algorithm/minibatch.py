"""The trees of a minibatch as segments with the weights and factors that make them one objective.

Every number here that is not one tree's is of the whole minibatch, over all processes, so that no split of it into
processes, rows and micro-batches changes the gradient. Letters: K thoughts, M answers, Q scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from vlm_grpo.algorithm.advantage import AdvantageConfig, Advantages
from vlm_grpo.algorithm.loss import Minibatch, PolicyLoss, TokenWeights, policy_loss, token_weights
from vlm_grpo.algorithm.objectives import Counts, LossConfig
from vlm_grpo.algorithm.shaping import ShapingConfig, entropy_threshold, path_lengths, segment_lengths, tree_entropies
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.features import Features
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.tree.pack import Segment, TreePack, pack, path_sequences, segment_sequences, tree_segments, with_weights
from vlm_grpo.tree.types import RolloutTree


@dataclass
class ObjectiveConfig(LossConfig, ShapingConfig, AdvantageConfig, RolloutConfig):
    """All that says what a step's objective is."""


@dataclass(frozen=True)
class Penalties:
    """What a tree's rewards were changed by, before they were compared."""

    overlong: float = 0.0  # summed over answers
    kl: float = 0.0  # summed over tokens


@dataclass(frozen=True)
class Graded:
    """A scored tree with what its rewards say, and its prompt's image features."""

    scored: ScoredTree
    advantages: Advantages
    features: Features | None
    place: int  # of the prompt among the step's prompts, over all processes
    # By the trained model, where the tree's own log-probabilities are another engine's, and its tokens' factors
    rescored: tuple[Tensor, Tensor] | None = None
    penalties: Penalties = Penalties()

    @property
    def is_kept(self) -> bool:
        """There are no images, or the graph that made their features is still there."""
        return self.features is None or all(t.requires_grad for t in self.features.tensors)


@dataclass(frozen=True)
class Prepared:
    """The trees that add to a minibatch's gradient, or those of one row of it, with all that their loss needs."""

    graded: Sequence[Graded]
    segments: Sequence[Sequence[Segment]]  # of each tree, with their weights
    num_entropies: int  # tokens of the whole minibatch that the entropy bonus is a mean over

    def only(self, indices: Sequence[int]) -> "Prepared":
        """These trees alone; their numbers stay those of the whole minibatch."""
        graded, segments = [self.graded[i] for i in indices], [self.segments[i] for i in indices]
        return Prepared(graded, segments, self.num_entropies)

    @property
    def is_kept(self) -> bool:
        """The graphs of all image features are still there."""
        return all(g.is_kept for g in self.graded)


def prepare(batch: Sequence[Graded], config: ObjectiveConfig, processes: Processes) -> Prepared:
    """This process's share of a minibatch as its update takes it; trees that add nothing are left out."""
    minibatch = count_minibatch(batch, config, processes)
    trees = [segments_of(graded, minibatch, config) for graded in batch]
    if config.top_entropy_quantile < 1:
        trees = with_top_entropies(batch, trees, config.top_entropy_quantile, processes)
    num_entropies = count_active(trees, config, processes) if config.entropy_coef > 0 else 1
    taught = [i for i, graded in enumerate(batch) if teaches(graded.advantages, config)]
    return Prepared(batch, trees, num_entropies).only(taught)


def teaches(advantages: Advantages, config: ObjectiveConfig) -> bool:
    """Whether a tree adds to the gradient: one whose advantages are all 0 adds exactly nothing without a penalty."""
    if not is_counted(advantages, config):
        return False
    penalised = (config.beta > 0 and config.kl_in == "loss") or config.entropy_coef > 0
    return penalised or bool(advantages.thoughts.any()) or bool(advantages.answers.any())


def is_counted(advantages: Advantages, config: ObjectiveConfig) -> bool:
    """Whether a prompt is one of the minibatch's."""
    return advantages.has_reward and not (config.dynamic_sampling == "drop" and advantages.has_zero_variance)


def trained_lengths(tree: RolloutTree, config: ObjectiveConfig) -> tuple[Int[Tensor, " K"], Int[Tensor, "K M"]]:
    """Scored tokens of each sequence of thoughts and of answers; 0 for one that is left out because it was cut.

    With credit=sequence there are only the paths, which stand with their answers.
    """
    keeps_cut = not config.mask_truncated_completions
    closed = torch.tensor([t.closed for t in tree.thoughts])
    answers_closed = torch.tensor(tree.by_answer(lambda answer: answer.closed, none=False))
    thoughts = torch.tensor([len(t.ids) for t in tree.thoughts])
    answers = torch.tensor(tree.by_answer(lambda answer: len(answer.ids), none=0))
    if config.credit == "sequence":
        return torch.zeros_like(thoughts), path_lengths(tree) * (keeps_cut | (closed[:, None] & answers_closed))
    return thoughts * (keeps_cut | closed), answers * (keeps_cut | answers_closed)


def count_minibatch(batch: Sequence[Graded], config: ObjectiveConfig, processes: Processes) -> Minibatch:
    """Count what the denominators are made of, over all processes' shares of a minibatch."""
    counts = [0, 0, 0]  # prompts, tokens of thoughts, tokens of answers
    for graded in batch:
        if is_counted(graded.advantages, config):
            thoughts, answers = trained_lengths(graded.scored.tree, config)
            counts[0] += 1
            counts[1] += int((thoughts * graded.advantages.valid_thoughts).sum())
            counts[2] += int((answers * graded.advantages.valid_answers).sum())
    prompts, thoughts, answers = (sum(column) for column in zip(*processes.gather([counts]), strict=True))
    longest = config.max_thought_length if config.credit == "sequence" else 0
    return Minibatch(
        thoughts=Counts(max(1, prompts), thoughts, config.max_thought_length),
        answers=Counts(max(1, prompts), answers, longest + config.max_answer_length),
    )


def segments_of(graded: Graded, minibatch: Minibatch, config: ObjectiveConfig) -> list[Segment]:
    """A tree's segments with the weight of each of their tokens, 0 if the prompt is not counted."""
    tree, advantages = graded.scored.tree, graded.advantages
    thoughts, answers = trained_lengths(tree, config)
    counted = is_counted(advantages, config)
    weights = token_weights(advantages, thoughts * counted, answers * counted, minibatch, config)
    if config.credit == "sequence":  # a thought's token weighs as much as all of its paths
        weights = TokenWeights(weights.answers.sum(dim=-1), weights.answers)
    segments = with_weights(
        tree_segments(tree), advantages.thoughts, advantages.answers, weights.thoughts, weights.answers
    )
    if graded.rescored is None:
        return segments
    lengths = segment_lengths(tree)
    parts = zip(*(values.split(lengths) for values in graded.rescored), strict=True)
    return segments[:1] + [
        replace(s, old_logprobs=old, factors=factors) for s, (old, factors) in zip(segments[1:], parts, strict=True)
    ]


def with_top_entropies(
    batch: Sequence[Graded], trees: Sequence[list[Segment]], quantile: float, processes: Processes
) -> list[list[Segment]]:
    """The trees with factor 0 for all but the share `quantile` of the minibatch's tokens that were sampled where the
    policy had most entropy. In later passes the entropies are still those of the rollout.
    """
    entropies = [
        tree_entropies(graded.scored.tree).split([s.num_scored for s in tree[1:]])
        for graded, tree in zip(batch, trees, strict=True)
    ]
    own = [
        float(value)
        for of_tree, tree in zip(entropies, trees, strict=True)
        for values, segment in zip(of_tree, tree[1:], strict=True)
        if segment.weight > 0
        for value in values
    ]
    least = entropy_threshold([value for part in processes.gather([own]) for value in part], quantile)
    marked = []
    for of_tree, tree in zip(entropies, trees, strict=True):
        rest = []
        for values, segment in zip(of_tree, tree[1:], strict=True):
            factors = torch.ones(len(values)) if segment.factors is None else segment.factors
            rest.append(replace(segment, factors=factors * (values >= least)))
        marked.append(tree[:1] + rest)
    return marked


def count_active(trees: Sequence[list[Segment]], config: ObjectiveConfig, processes: Processes) -> int:
    """Tokens of the whole minibatch that the entropy bonus is a mean over, at least 1."""
    own = 0
    for tree in trees:
        row = pack([tree])
        sequences = path_sequences(row) if config.credit == "sequence" else segment_sequences(row)
        own += int(((sequences.weights > 0) & (row.factors[sequences.index] > 0)).sum())
    return max(1, sum(processes.gather([own])))


def row_loss(
    row: TreePack,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    entropies: Tensor | None,
    num_entropies: int,
    config: ObjectiveConfig,
) -> PolicyLoss:
    """The loss of a row of trees, of its Q scored tokens; see `policy_loss`."""
    sequences = path_sequences(row) if config.credit == "sequence" else segment_sequences(row)
    index = sequences.index
    return policy_loss(
        logprobs[index],
        row.old_logprobs[index],
        None if ref_logprobs is None else ref_logprobs[index],
        sequences.advantages,
        sequences.weights,
        config,
        sequence=sequences.sequence,
        factors=row.factors[index],
        entropies=None if entropies is None else entropies[index],
        num_entropies=num_entropies,
    )
