"""How tokens are drawn: the options, and what draws by them. V is the vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.common.options import Range

SEEDS = Range(at_least=0, at_most=2**32 - 1)  # from which every generator of a run can be made


@dataclass
class SamplingConfig:
    """How thoughts and answers are sampled."""

    ROOM = "rollout"

    # Thoughts sampled per prompt (K)
    num_thoughts: Annotated[int, Range(at_least=1)] = 4
    # Answers sampled per thought (M); 1 is plain GRPO sampling
    num_answers: Annotated[int, Range(at_least=1)] = 4
    # Tokens after which a thought is cut
    max_thought_length: Annotated[int, Range(at_least=1)] = 16
    # Tokens after which an answer is cut
    max_answer_length: Annotated[int, Range(at_least=1)] = 24
    # Divides the logits, in sampling and in the update alike
    temperature: Annotated[float, Range(above=0, below=math.inf)] = 1.0
    # Sample from the smallest set of tokens that holds at least this probability
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    # Sample from this many likeliest tokens; 0 is all
    top_k: Annotated[int, Range(at_least=0)] = 0
    # Sample from tokens with at least this share of the likeliest token's probability
    min_p: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    # Trees that grow at the same time; a finished one makes room for the next prompt of the step
    rollout_lanes: Annotated[int, Range(at_least=1)] = 32
    # Neither tags nor end-of-sequence ids end a thought or an answer; for benchmarks of equal lengths
    ignore_eos: bool = False


# What moves no greedy answer
DRAW_OPTIONS = ("num_thoughts", "num_answers", "top_p", "top_k", "min_p")


# Log-probabilities → ids. The numbers are the prompts (their places in the call) whose trees the rows belong to; rows
# of one tree stand together, in an order that depends on that tree alone
Sampler = Callable[[Float[Tensor, "n V"], Sequence[int]], Int[Tensor, " n"]]


def greedy(logprobs: Float[Tensor, "n V"], trees: Sequence[int]) -> Int[Tensor, " n"]:
    """The likeliest token."""
    return logprobs.argmax(-1)


def sampler(config: SamplingConfig, generator: torch.Generator) -> Sampler:
    """Draws by top-k, then top-p, then min-p from tempered log-probabilities, with the generator's randomness."""

    def draw(logprobs: Float[Tensor, "n V"], trees: Sequence[int]) -> Int[Tensor, " n"]:
        kept = _truncate(logprobs, config.top_k, config.top_p, config.min_p)
        noise = torch.empty_like(kept).exponential_(generator=generator)
        return (kept.exp() / noise).argmax(-1)  # the exponential race: P(argmax = i) is proportional to exp(kept_i)

    return draw


def tree_sampler(config: SamplingConfig, generators: Sequence[torch.Generator]) -> Sampler:
    """As `sampler`, with one generator per prompt: what a tree draws does not depend on the trees grown beside it."""

    def draw(logprobs: Float[Tensor, "n V"], trees: Sequence[int]) -> Int[Tensor, " n"]:
        kept = _truncate(logprobs, config.top_k, config.top_p, config.min_p)
        noise = torch.empty_like(kept)
        for tree, rows in groupby(range(len(trees)), trees.__getitem__):
            first, *others = rows
            noise[first : first + 1 + len(others)].exponential_(generator=generators[tree])
        return (kept.exp() / noise).argmax(-1)

    return draw


def _truncate(logprobs: Float[Tensor, "n V"], top_k: int, top_p: float, min_p: float) -> Float[Tensor, "n V"]:
    if top_k > 0:
        least = logprobs.topk(min(top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    if top_p < 1.0:
        ordered, index = logprobs.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of all likelier tokens
        drop = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logprobs = logprobs.masked_fill(drop, -torch.inf).log_softmax(-1)
    if min_p > 0.0:
        least = logprobs.max(-1, keepdim=True).values + torch.log(torch.tensor(min_p))
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
    return logprobs
