"""What the gradient looks like: its spikes, the part of the thoughts and that of the answers, its rank and its gaps.

Letters: R trees of a step, D numbers of a layer's weight, K thoughts, M answers of each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.names import nearest
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes

SPIKE = 10.0  # a gradient of more than so many times the mean norm is counted as a spike
SPARSE = 1e-3  # an entry of at most this share of the matrix's root mean square counts as a gap
CHUNK = 2**20  # columns that are taken to float64 at a time


@dataclass
class DiagnosticsConfig:
    """What the gradient looks like."""

    ROOM = "algorithm"

    # Steps between looks at the parts of the gradient: norms of the thoughts' and of the answers' term and the cosine
    # between them; each look costs about as much as two or three updates and changes nothing; 0: none
    diagnostics_every: Annotated[int, Range(at_least=0)] = 0
    # Matrices, by name or pattern as in *.mlp.down_proj.weight, of which each look tells the effective rank and the
    # sparsity of the gradient over the step's trees; it keeps one gradient of them for each tree
    diagnostics_layers: str | list[str] = field(default_factory=list)

    @property
    def layer_patterns(self) -> list[str]:
        """The patterns of `diagnostics_layers`, also where it is only one."""
        given = self.diagnostics_layers
        return [given] if isinstance(given, str) else list(given)


@dataclass
class SpikeScore:
    """The gradient spike score of each optimiser step and the share of steps above SPIKE so far.

        GSS(g_t) = |g_t| / mean_{s <= t} |g_s|

    Source: arXiv 2501.06842. |g| is the global norm before clipping. It cannot exceed t: the first SPIKE steps have no
    spike. A step that was skipped because its norm is not finite has no score (NaN) and enters no mean.
    """

    count: int = 0
    total: float = 0.0  # of the norms
    spikes: int = 0

    def add(self, norm: float) -> float:
        """The score of the next optimiser step, which this object then remembers."""
        if not math.isfinite(norm):
            return math.nan
        self.count += 1
        self.total += norm
        score = norm * self.count / self.total if self.total > 0 else 0.0
        self.spikes += score > SPIKE
        return score

    @property
    def share(self) -> float:
        """Share of the steps with a score that have one above SPIKE (GSS@10)."""
        return self.spikes / self.count if self.count else 0.0


def effective_rank(matrix: Float[Tensor, "R D"]) -> float:
    """exp(entropy of the normalised singular values): 1 for one direction, n for n equal ones, 0 for a zero matrix.

    >>> effective_rank(torch.eye(3)), effective_rank(torch.ones(4, 5)), effective_rank(torch.zeros(2, 2))
    (3.0, 1.0, 0.0)
    """
    rows = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
    for first in range(0, rows.shape[1], CHUNK):
        part = rows[:, first : first + CHUNK].double()
        gram += part @ part.T
    squares = torch.linalg.eigvalsh(gram)
    # what is below the rounding of the largest one is none
    squares = squares.where(squares > squares.amax() * gram.shape[0] * torch.finfo(gram.dtype).eps, 0.0)
    if not bool((squares > 0).any()):
        return 0.0
    singular = squares.sqrt()
    share = singular / singular.sum()
    return round(float(torch.special.entr(share).sum().exp()), 9)


def sparsity(matrix: Float[Tensor, "R D"]) -> float:
    """Share of entries that are at most SPARSE times the matrix's root mean square; 1 for a zero matrix.

    >>> sparsity(torch.tensor([[1.0, 0.0], [0.0, -2.0], [0.0, 1e-6]]))
    0.6666666666666666
    """
    size = matrix.double().square().mean().sqrt()
    return float((matrix.abs() <= SPARSE * size).double().mean())


def thought_advantage_variance(
    means: Float[Tensor, " K"], variances: Float[Tensor, " K"], num_answers: int
) -> Float[Tensor, " K"]:
    """First-order variance of each thought's advantage around its true value, for M = num_answers sampled answers.

        Var(A_i) = 1 / (M s^2) * sum_j var_j (delta_ij - 1/K - a_i a_j / K)^2,   a_i = (mean_i - mean) / s

    `means` and `variances` are those of the reward of an answer to each thought; s is the population standard deviation
    of the means, by which the advantage is divided. The delta method for arXiv 2509.24494's A(th); good for M of about
    16 and more. Infinite or NaN where all means are equal.
    """
    means, variances = means.double(), variances.double()
    count = len(means)
    spread = means.std(correction=0)
    standard = (means - means.mean()) / spread
    slope = torch.eye(count, dtype=torch.float64) - (1 + standard[:, None] * standard) / count  # (K, K)
    return (variances * slope.square()).sum(-1) / (num_answers * spread.square())


def matching_layers(named: Sequence[tuple[str, nn.Parameter]], patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """The trainable matrices whose names match a pattern. Raises: UserError for a pattern that matches none."""
    matrices = {name: weight for name, weight in named if weight.ndim >= 2}
    found: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        names = [name for name in matrices if fnmatchcase(name, pattern)]
        if not names:
            near = nearest(pattern, matrices, cutoff=0.3) or next(iter(matrices), "none")
            raise UserError(
                f"diagnostics_layers: {pattern!r} matches none of the {len(matrices)} matrices that train; one of them "
                f"is {near}, and * stands for any text"
            )
        found |= {name: matrices[name] for name in names}
    return found


# Adds to the weights the gradient of this process's tree of this index: of its answers' term, or else of its thoughts'
Backward = Callable[[int, bool], None]


def measure_gradient(
    named: Sequence[tuple[str, nn.Parameter]],
    layers: Mapping[str, nn.Parameter],
    own_trees: int,
    num_trees: int,
    backward: Backward,
    processes: Processes,
) -> dict[str, float]:
    """What the gradient of a step looks like; the gradients that the weights have are there again when this returns.

    `own_trees` are this process's trees that have a gradient, `num_trees` all trees of all processes.

    `grad_norm/thoughts` and `grad_norm/answers`: norms of the two terms, whose sum is the gradient; `grad_cosine`
    between them (NaN where one is zero). Of each layer `grad_rank/{name}`: effective rank of the R x D matrix that has
    each tree's gradient as a row; `grad_matrix_rank/{name}`: effective rank of a tree's gradient as the matrix the
    layer is, mean over the trees where it is not zero; `grad_sparsity/{name}`: of the R x D matrix, trees without a
    gradient included.
    """
    of_trees: list[dict[str, Tensor]] = [{} for _ in range(own_trees)]
    with _gradients_set_aside([weight for _, weight in named]):
        thoughts, answers = (_term(named, layers, of_trees, backward, of, processes) for of in (False, True))
    norms = [math.sqrt(_dot(term, term)) for term in (thoughts, answers)]
    product = math.prod(norms)
    metrics = {"grad_norm/thoughts": norms[0], "grad_norm/answers": norms[1]}
    metrics["grad_cosine"] = _dot(thoughts, answers) / product if product > 0 else math.nan
    for name, weight in layers.items():
        matrices = [gradients[name].flatten(1) for gradients in of_trees if name in gradients]
        ranks = processes.gather([rank for m in matrices if (rank := effective_rank(m)) > 0])
        rows = processes.gather([m.flatten().cpu() for m in matrices])
        every = torch.zeros(max(1, num_trees), weight.numel(), dtype=_wide(weight).dtype)  # (R, D)
        for row, values in zip(every, rows, strict=False):
            row.copy_(values)
        metrics[f"grad_rank/{name}"] = effective_rank(every)
        metrics[f"grad_matrix_rank/{name}"] = math.fsum(ranks) / len(ranks) if ranks else math.nan
        metrics[f"grad_sparsity/{name}"] = sparsity(every)
    return metrics


@contextmanager
def _gradients_set_aside(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    kept = [weight.grad for weight in weights]
    try:
        yield
    finally:
        for weight, gradient in zip(weights, kept, strict=True):
            weight.grad = gradient


def _term(
    named: Sequence[tuple[str, nn.Parameter]],
    layers: Mapping[str, nn.Parameter],
    of_trees: Sequence[dict[str, Tensor]],
    backward: Backward,
    of_answers: bool,
    processes: Processes,
) -> list[Tensor | None]:
    """The gradient of one term over all processes, by weight; each tree's own share of a layer is added to its entry
    of `of_trees`.
    """
    weights = [weight for _, weight in named]
    for weight in weights:
        weight.grad = None
    sums: dict[str, Tensor] = {}
    for index, gradients in enumerate(of_trees):
        backward(index, of_answers)
        for name, layer in layers.items():
            if layer.grad is not None:
                own = _wide(layer.grad)
                gradients[name] = gradients[name] + own if name in gradients else own
                sums[name] = sums[name] + own if name in sums else own.clone()
                layer.grad = None
    for name, total in sums.items():
        layers[name].grad = total.to(layers[name].dtype)
    if any(processes.gather([any(weight.grad is not None for weight in weights)])):
        processes.sum_gradients(weights)
    return [weight.grad for weight in weights]


def _dot(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """Inner product of two gradients, float64 over weights; a missing one counts as zero."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return math.fsum(float((_wide(a) * _wide(b)).sum(dtype=torch.float64)) for a, b in pairs)


def _wide(values: Tensor) -> Tensor:
    """The values in float32, or float64 where they are."""
    return values if values.dtype == torch.float64 else values.float()
