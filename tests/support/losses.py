"""Random prompts of tokens for the loss."""

import math

import torch

from vlm_grpo.algorithm.loss import Minibatch
from vlm_grpo.algorithm.objectives import Counts

NAN = math.nan
MAX_LENGTHS = 8, 5  # at which thoughts and answers would be cut


def tokens(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_prompts(seed, num_prompts=3):
    """Per prompt: rewards and scored lengths, ragged; every other prompt lacks rewards, one answer is empty."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for i in range(num_prompts):
        num_thoughts, num_answers = torch.randint(2, 5, (2,), generator=generator).tolist()
        rewards = torch.rand((num_thoughts, num_answers), generator=generator, dtype=torch.float64)
        if i % 2:
            rewards[0] = NAN
            rewards[1, 1] = NAN
        thought_lengths = torch.randint(1, 7, (num_thoughts,), generator=generator)
        answer_lengths = torch.randint(1, 4, (num_thoughts, num_answers), generator=generator)
        answer_lengths[-1, -1] = 0
        prompts.append((rewards, thought_lengths, answer_lengths))
    return prompts


def minibatch_of(prompts):
    """What the denominators count, by nested loops."""
    thoughts = answers = 0
    for rewards, thought_lengths, answer_lengths in prompts:
        for row, length, row_lengths in zip(rewards.tolist(), thought_lengths.tolist(), answer_lengths, strict=True):
            known = [not math.isnan(r) for r in row]
            thoughts += length if any(known) else 0
            answers += sum(n for n, ok in zip(row_lengths.tolist(), known, strict=True) if ok)
    prompts = len(prompts)
    return Minibatch(Counts(prompts, thoughts, MAX_LENGTHS[0]), Counts(prompts, answers, MAX_LENGTHS[1]))
