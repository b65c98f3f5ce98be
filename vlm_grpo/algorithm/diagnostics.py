"""Diagnostics of the gradient: spikes, norms of the thoughts' and the answers' term, effective rank and sparsity.

Letters: R trees of a step, D entries of a layer's weight, K thoughts, M answers of each.
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

SPIKE = 10.0  # a gradient norm above so many times the mean norm is a spike
SPARSE = 1e-3  # an entry of at most this share of the matrix's root mean square counts as zero
CHUNK = 2**20  # columns that are converted to float64 at a time


@dataclass
class DiagnosticsConfig:
    """Gradient diagnostics."""

    ROOM = "algorithm"

    # Steps between looks at the parts of the gradient: norms of the thoughts' and of the answers' term and the cosine
    # between them; each look costs about as much as two or three updates and changes nothing; 0: none
    diagnostics_every: Annotated[int, Range(at_least=0)] = 0
    # Matrices, by name or pattern as in *.mlp.down_proj.weight, of which each look tells the effective rank and the
    # sparsity of the gradient over the step's trees; it keeps one gradient of them for each tree
    diagnostics_layers: str | list[str] = field(default_factory=list)

    @property
    def layer_patterns(self) -> list[str]:
        """The patterns of `diagnostics_layers` as a list."""
        given = self.diagnostics_layers
        return [given] if isinstance(given, str) else list(given)


@dataclass
class SpikeScore:
    """The gradient spike score (GSS) of each optimiser step, and the share of steps so far whose score is above SPIKE.

        GSS(g_t) = |g_t| / mean_{s <= t} |g_s|

    Source: arXiv 2501.06842. |g| is the global norm before clipping. GSS(g_t) cannot exceed t, so the first SPIKE steps
    have no spike. A step that was skipped because its norm is not finite has GSS NaN and enters no mean.
    """

    count: int = 0
    total: float = 0.0  # of the norms
    spikes: int = 0

    def add(self, norm: float) -> float:
        """Count the norm of the next optimiser step; returns its spike score."""
        if not math.isfinite(norm):
            return math.nan
        self.count += 1
        self.total += norm
        score = norm * self.count / self.total if self.total > 0 else 0.0
        self.spikes += score > SPIKE
        return score

    @property
    def share(self) -> float:
        """Share of the steps with a finite norm whose spike score is above SPIKE (GSS@10)."""
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
    # A value below the rounding of the largest one counts as 0
    squares = squares.where(squares > squares.amax() * gram.shape[0] * torch.finfo(gram.dtype).eps, 0.0)
    if not bool((squares > 0).any()):
        return 0.0
    singular = squares.sqrt()
    share = singular / singular.sum()
    return round(float(torch.special.entr(share).sum().exp()), 9)


def sparsity(matrix: Float[Tensor, "R D"]) -> float:
    """Share of entries whose size is at most SPARSE times the matrix's root mean square; 1 for a zero matrix.

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

    `means` and `variances` are the moments of an answer's reward, for each thought; s is the population standard
    deviation of the means. This is the delta method for A(th) of arXiv 2509.24494; it is accurate for M of about 16 and
    more. The result is infinite or NaN where all means are equal.
    """
    means, variances = means.double(), variances.double()
    count = len(means)
    spread = means.std(correction=0)
    standard = (means - means.mean()) / spread
    slope = torch.eye(count, dtype=torch.float64) - (1 + standard[:, None] * standard) / count  # (K, K)
    return (variances * slope.square()).sum(-1) / (num_answers * spread.square())


def matching_layers(named: Sequence[tuple[str, nn.Parameter]], patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """The trainable matrices whose names match a pattern, by name. Raises: UserError if a pattern matches none."""
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


# backward(index, of_answers) adds the gradient of one of this process's trees to the weights: that of the tree's
# answers' term if of_answers, else that of its thoughts' term
Backward = Callable[[int, bool], None]


def measure_gradient(
    named: Sequence[tuple[str, nn.Parameter]],
    layers: Mapping[str, nn.Parameter],
    own_trees: int,
    num_trees: int,
    backward: Backward,
    processes: Processes,
) -> dict[str, float]:
    """Diagnostics of a step's gradient, as metrics. The weights' own gradients are restored before this returns.

    `own_trees` counts this process's trees that have a gradient, `num_trees` all trees of all processes.

    `grad_norm/thoughts` and `grad_norm/answers` are the norms of the two terms, whose sum is the gradient;
    `grad_cosine` is the cosine between them (NaN where a term is zero). For each layer, `grad_rank/{name}` is the
    effective rank of the R x D matrix whose rows are the trees' gradients, `grad_sparsity/{name}` is the sparsity of
    that matrix (trees without a gradient are rows of zeros), and `grad_matrix_rank/{name}` is the effective rank of a
    tree's gradient in the shape of the layer's weight, as a mean over the trees where it is not zero.
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
    """The gradient of one term over all processes, for each weight. Adds each tree's own gradient of the layers to the
    tree's entry in `of_trees`.
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
    """Inner product of two gradients, summed in float64; a weight without a gradient counts as zero."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return math.fsum(float((_wide(a) * _wide(b)).sum(dtype=torch.float64)) for a, b in pairs)


def _wide(values: Tensor) -> Tensor:
    """The values in float64 if they are float64, else in float32."""
    return values if values.dtype == torch.float64 else values.float()
