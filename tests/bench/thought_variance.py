"""How far a thought's advantage is from its true value, against K thoughts and M answers, with the policy frozen.

    OMP_NUM_THREADS=2 python tests/bench/thought_variance.py --json variance.json

GRPO-MA (arXiv 2509.24494) holds that this variance keeps a floor as K grows and falls like 1/M as M grows. Here 16
thoughts of each question are kept, and many answers are sampled to each: half of them give the thought's true value,
the other half, in disjoint groups of M, the advantages that training would have seen, among the first K thoughts, the
next K and so on. Beside what is measured stand the first-order formula, and both for made-up thoughts: success
probabilities Beta(2, 2), Bernoulli answers. Advantages have the population standard deviation, epsilon 0.

`variance` is around the mean of the sampled advantages, `error` around the true value (variance plus squared bias).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vlm_grpo.algorithm.diagnostics import thought_advantage_variance
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model.load import ModelConfig, load_vlm
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.sampling import sampler
from vlm_grpo.task import find_task, score
from vlm_grpo.tree.types import Prompt, Thought

THOUGHTS = (4, 16)
ANSWERS = (1, 4, 16)
BLOCK = 128  # answers of one thought that are sampled together


def continued(prompt: Prompt, thought: Thought) -> Prompt:
    """The prompt with the thought and its bridge behind it, so that answers can be sampled as if they were thoughts."""
    more = torch.cat([thought.ids, thought.bridge_ids])
    places = torch.arange(prompt.next_position, prompt.next_position + len(more))
    return replace(
        prompt,
        ids=torch.cat([prompt.ids, more]),
        position_ids=torch.cat([prompt.position_ids, places.expand(len(prompt.position_ids), -1)], dim=-1),
        image_block=torch.cat([prompt.image_block, torch.full((len(more),), -1)]),
    )


def sample_rewards(
    task_name: str, num_prompts: int, num_answers: int, parts: Sequence[str], seed: int
) -> dict[str, np.ndarray]:
    """Rewards (prompts, 16, answers) of the tiny model's answers to 16 thoughts of each question, and parts of them."""
    vlm = load_vlm(ModelConfig(), 1.0, torch.device("cpu"))
    task = find_task(task_name, {}, demo=True)
    samples = task.samples("train")
    prompts = PromptReader(vlm.prompts, task, DataConfig(), 10_000).read([samples[i] for i in range(num_prompts)])
    with torch.no_grad():
        features = vlm.encode(prompts)
    config = RolloutConfig(num_thoughts=max(THOUGHTS), num_answers=1)
    draw = sampler(config, torch.Generator().manual_seed(seed))
    trees = Engine(vlm, config).rollout(prompts, features, draw)
    # An engine whose thoughts end as answers do; one token stands for the answer, and is not looked at
    lengths = {"max_thought_length": config.max_answer_length, "max_answer_length": 1}
    engine = Engine(vlm, RolloutConfig(num_thoughts=BLOCK, num_answers=1, rollout_lanes=8, **lengths))
    engine.growth.tags = replace(engine.growth.tags, thought=engine.growth.tags.answer)
    rewards = {name: np.zeros((num_prompts, max(THOUGHTS), num_answers)) for name in ("reward", *parts)}
    for place, (tree, feature) in enumerate(zip(trees, features, strict=True)):
        sample = tree.prompt.sample
        longer = [continued(tree.prompt, thought) for thought in tree.thoughts for _ in range(num_answers // BLOCK)]
        grown = engine.rollout(longer, [feature] * len(longer), draw)
        texts = [answer_in_original(tree.prompt, answer.text) for of_prompt in grown for answer in of_prompt.thoughts]
        scored = [score(task, sample, text) for text in texts]
        for name, values in rewards.items():
            found = [0.0 if r is None else r.value if name == "reward" else r.parts[name] for r in scored]
            values[place] = np.array(found).reshape(max(THOUGHTS), num_answers)
        print(f"question {place + 1} of {num_prompts}", file=sys.stderr, flush=True)
    return rewards


def made_rewards(num_prompts: int, num_answers: int, seed: int) -> np.ndarray:
    """Bernoulli answers to thoughts whose success probabilities are Beta(2, 2)."""
    generator = np.random.default_rng(seed)
    rates = generator.beta(2, 2, (num_prompts, max(THOUGHTS), 1))
    return generator.binomial(1, rates, (num_prompts, max(THOUGHTS), num_answers)).astype(float)


def standardised(values: np.ndarray) -> np.ndarray:
    """Along the last axis; 0 where all are equal."""
    centred = values - values.mean(-1, keepdims=True)
    spread = values.std(-1, keepdims=True)
    return np.where(spread > 1e-9, centred / np.maximum(spread, 1e-9), 0.0)


def measure(rewards: np.ndarray, num_thoughts: int, num_answers: int) -> dict[str, float]:
    """Variance, error and formula, each a mean over groups of thoughts (and of the formula the median: where thoughts
    are nearly equal it grows without bound).
    """
    known, seen = np.split(rewards, 2, axis=-1)  # (prompts, thoughts, answers)
    found: dict[str, list[float]] = {"variance": [], "error": [], "formula": []}
    silent = 0
    for of_prompt, of_seen in zip(known, seen, strict=True):
        for first in range(0, rewards.shape[1], num_thoughts):
            group = of_prompt[first : first + num_thoughts]
            means, variances = group.mean(-1), group.var(-1, ddof=1)
            if means.std() < 1e-6:
                silent += 1
                continue
            count = of_seen.shape[-1] // num_answers
            values = of_seen[first : first + num_thoughts, : count * num_answers]
            drawn = standardised(values.reshape(num_thoughts, count, num_answers).mean(-1).T)  # (draws, K)
            found["variance"].append(drawn.var(0, ddof=1).mean())
            found["error"].append(np.square(drawn - standardised(means)).mean())
            expected = thought_advantage_variance(torch.from_numpy(means), torch.from_numpy(variances), num_answers)
            found["formula"].append(float(expected.mean()))
    means_of = {name: float(np.mean(values)) for name, values in found.items()}
    return means_of | {"formula_median": float(np.median(found["formula"])), "silent_groups": silent}


def table(rewards: np.ndarray) -> dict[str, dict[str, float]]:
    """The measures of every K and M."""
    return {f"K={k} M={m}": measure(rewards, k, m) for k in THOUGHTS for m in ANSWERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="refcoco")
    parser.add_argument("--part", action="append", default=[], help="a part of the reward, measured too, as acc@0.5")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--answers", type=int, default=256, help="to each thought; a multiple of 128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.answers < 2 * BLOCK or given.answers % BLOCK:
        parser.error(f"--answers {given.answers}: must be a multiple of {BLOCK} of at least {2 * BLOCK}")
    began = time.perf_counter()
    rewards = sample_rewards(given.task, given.prompts, given.answers, given.part, given.seed)
    rewards["made"] = made_rewards(400, 512, given.seed)
    report = {}
    for source, values in rewards.items():
        facts = {"mean": values.mean(), "between": values.mean(-1).var(-1).mean(), "within": values.var(-1).mean()}
        cells = table(values)
        report[source] = {**facts, "cells": cells}
        print("\n" + source, *(f"{name} {value:.4f}" for name, value in facts.items()), sep="  ")
        print(" " * 12 + "".join(f"{name:>16}" for name in next(iter(cells.values()))))
        for cell, numbers in cells.items():
            print(f"{cell:12}" + "".join(f"{value:16.3f}" for value in numbers.values()))
    print(f"\n{time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
