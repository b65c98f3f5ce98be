"""GRPO-MA: one step from samples to better weights, reading as `encode, grow, score, compare, update`.

Letters: K thoughts, M answers, Q scored tokens.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.advantage import AdvantageConfig, Advantages, check_advantage_options, group_advantages
from vlm_grpo.data import PromptReader, skip_counts
from vlm_grpo.engine import Engine, SamplingConfig, check_sampling_options, sampler
from vlm_grpo.errors import UserError
from vlm_grpo.loss import LossConfig, check_loss_options, loss_metrics, policy_loss, token_weights
from vlm_grpo.metrics import RolloutRow
from vlm_grpo.optim import OptimConfig, Optimizer, check_optim_options, learning_rate
from vlm_grpo.processes import Processes
from vlm_grpo.rollout import Prompt
from vlm_grpo.scorer import Judges, ScoreConfig, ScoredTree, check_score_options, score_trees
from vlm_grpo.stats import step_metrics
from vlm_grpo.task import Sample, Tasks, by_name
from vlm_grpo.tree import Segment, TreePack, fill_rows, pack, packed_length, tree_segments
from vlm_grpo.vlm import VLM, Features, join_features

PATCH_VALUES = 2 * 3 * 14 * 14  # numbers in the pixels of a patch, by which patches are counted


@dataclass
class StepConfig(OptimConfig, LossConfig, AdvantageConfig, ScoreConfig, SamplingConfig):
    """One training step."""

    # Seed of the order of samples and of all sampling
    seed: int = 0
    # Steps of the run
    max_steps: int = 240
    # Prompts whose trees are grown in one step, over all processes
    prompts_per_step: int = 16
    # Prompts of one optimiser step; none: all of the step's
    prompts_per_minibatch: int | None = None
    # Passes over the step's rollouts
    num_iterations: int = 1
    # Trees are packed into rows of at most so many tokens; a longer tree has a row of its own
    max_tokens_per_row: int = 2048


def check_step_options(config: StepConfig) -> None:
    """Raise UserError for values that no step can be made of."""
    check_advantage_options(config, config.num_answers)
    check_score_options(config)
    check_loss_options(config)
    check_optim_options(config)
    check_sampling_options(config)
    for name in ("max_steps", "prompts_per_step", "num_iterations", "max_tokens_per_row"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)}: must be at least 1")
    if config.prompts_per_minibatch is not None and config.prompts_per_minibatch < 1:
        raise UserError(f"prompts_per_minibatch={config.prompts_per_minibatch}: must be at least 1")
    if config.num_thoughts == 1 and config.num_answers == 1:
        raise UserError("num_thoughts=1 with num_answers=1 leaves nothing to compare: raise one of them")


@dataclass(frozen=True)
class Graded:
    """A scored tree with what its rewards say, and its prompt's image features."""

    scored: ScoredTree
    advantages: Advantages
    features: Features | None
    place: int  # of the prompt among the step's prompts, over all processes

    @property
    def is_kept(self) -> bool:
        """There are no images, or the graph that made their features is still there."""
        return self.features is None or all(t.requires_grad for t in self.features.tensors)


@dataclass
class Clock:
    """Seconds of each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Any:
        """Add the time inside to the phase; on a GPU its queue is emptied first."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for its reader; metrics are over all processes, rows are this process's."""

    metrics: dict[str, float]
    rows: list[RolloutRow]
    num_tokens: int  # sampled, over all processes


class Trainer:
    """Owns the optimiser and the engine; the model, the task or tasks, and the processes are given."""

    def __init__(self, vlm: VLM, tasks: Tasks, reader: PromptReader, config: StepConfig, processes: Processes) -> None:
        check_step_options(config)
        self.vlm, self.tasks, self.reader = vlm, by_name(tasks), reader
        self.judges = Judges(tasks)
        self.config, self.processes = config, processes
        self.optimizer = Optimizer(vlm.model, config, processes)
        self.engine = Engine(vlm, config)
        self.tower_trains = vlm.tower_trains
        self._on_policy = True  # the weights are those that the present trees were sampled with
        self._agreed = self._sighted = False

    def step(self, number: int, samples: Sequence[Sample]) -> StepResult:
        """Step 1, 2, …: the samples of all processes are given, each process works on its own share."""
        start, clock, device = time.perf_counter(), Clock(), self.vlm.device
        generator = torch.Generator(device).manual_seed(step_seed(self.config.seed, number, self.processes.rank))
        with clock.phase("encode", device):
            read = [
                (place, prompt)
                for place in self.processes.share(len(samples))
                for prompt in self.reader.read([samples[place]])
            ]
            prompts = [prompt for _, prompt in read]
            features = self._encode(prompts)
        with clock.phase("rollout", device):
            trees = self.engine.rollout(prompts, features, sampler(self.config, generator))
        with clock.phase("reward", device):
            timeouts = self.judges.timeouts
            scored = score_trees(self.vlm, self.judges, trees, self.config)
            timeouts = self.judges.timeouts - timeouts
        graded = [
            Graded(s, group_advantages(s.values, self.config), f, place)
            for s, f, (place, _) in zip(scored, features, read, strict=True)
        ]
        with clock.phase("update", device):
            sums = self.update(graded, len(samples), learning_rate(self.config, number, self.config.max_steps))
        clock.seconds |= self.engine.seconds
        facts = {**clock.seconds, "step": time.perf_counter() - start}
        metrics = step_metrics([(g.scored, g.advantages) for g in graded], self.processes, list(self.tasks)) | sums
        metrics |= {f"time/{name}": seconds for name, seconds in facts.items() if name != "step"}
        metrics |= {"step_time": facts["step"], "skipped_steps": float(self.optimizer.skipped_steps)}
        metrics |= skip_counts(self.reader.skipped, self.processes)
        metrics["reward_timeouts"] = float(sum(self.processes.gather([timeouts])))
        return StepResult(metrics, _rows(graded), int(metrics["num_tokens"]))

    def _encode(self, prompts: Sequence[Prompt]) -> list[Features | None]:
        """Image features of each prompt for its rollout; those of a trainable tower with their graph, for the first
        update, as long as the patches are no more than the tokens of a row, whose activations take memory likewise.
        """
        kept: list[Features | None] = []
        patches = 0
        for prompt in prompts if self.tower_trains else ():
            patches += prompt.pixels["pixel_values"].numel() // PATCH_VALUES if prompt.pixels else 0
            if patches > self.config.max_tokens_per_row:
                break
            kept += self.vlm.encode([prompt])
        with torch.no_grad():
            return kept + self.vlm.encode(prompts[len(kept) :])

    def update(self, graded: Sequence[Graded], num_samples: int, rate: float) -> dict[str, float]:
        """All optimiser steps on a step's rollouts; gives back loss metrics over all of them."""
        size = self.config.prompts_per_minibatch or num_samples
        totals: dict[str, float] = {}
        norms: list[float] = []
        self._on_policy = True
        for _ in range(self.config.num_iterations):
            for first in range(0, num_samples, size):
                batch = [g for g in graded if first <= g.place < first + size]
                sums = self.backward(batch)
                every = self.processes.gather([sums])
                for name in sums:
                    totals[name] = totals.get(name, 0.0) + sum(part[name] for part in every)
                norms.append(self.optimizer.step(rate, self.vlm.family.vision_modules))
                self._on_policy = False
        metrics = loss_metrics(totals) | {"loss": totals["loss"] / len(norms), "learning_rate": rate}
        return metrics | {"grad_norm": sum(norms) / len(norms)}

    def backward(self, batch: Sequence[Graded]) -> dict[str, float]:
        """Add this process's share of one minibatch's gradient to the weights; gives back sums over its tokens.

        The denominators are of the whole minibatch over all processes, so no split of it changes the gradient.
        """
        valid = sum(bool(g.advantages.valid_answers.any()) for g in batch)
        num_prompts = max(1, sum(self.processes.gather([valid])))
        chosen = [g for g in batch if self._teaches(g.advantages)]
        trees = [self._segments(g, num_prompts) for g in chosen]
        names = ("tokens", "kl", "ratio", "clipped_low", "clipped_high", "loss")
        totals: dict[str, float] = {name: 0.0 for name in names}
        rows = fill_rows([packed_length(tree) for tree in trees], self.config.max_tokens_per_row)
        # Kept graphs first, so that their memory is free again
        for row in sorted(map(sorted, rows), key=lambda row: not all(chosen[i].is_kept for i in row)):
            sums = self._backward_row([trees[i] for i in row], [chosen[i] for i in row])
            totals = {name: totals[name] + float(value) for name, value in sums.items()}
        return totals

    def _teaches(self, advantages: Advantages) -> bool:
        """Without a penalty, a tree whose advantages are all 0 adds exactly nothing to the gradient."""
        if not bool(advantages.valid_answers.any()):
            return False
        return self.config.beta > 0 or bool(advantages.thoughts.any()) or bool(advantages.answers.any())

    def _segments(self, graded: Graded, num_prompts: int) -> list[Segment]:
        tree, advantages = graded.scored.tree, graded.advantages
        thoughts = torch.tensor([len(t.ids) for t in tree.thoughts])
        answers = torch.tensor([[len(a.ids) for a in t.answers] for t in tree.thoughts])
        weights = token_weights(advantages, thoughts, answers, num_prompts, self.config)
        return tree_segments(tree, advantages.thoughts, advantages.answers, weights.thoughts, weights.answers)

    def _backward_row(self, trees: Sequence[Sequence[Segment]], graded: Sequence[Graded]) -> dict[str, Tensor]:
        """A trainable tower encodes the row's images again, with a graph, unless that of the rollout was kept and the
        weights are still the same: once per image and update, for a prompt is in one row.
        """
        prompts = [g.scored.tree.prompt for g in graded]
        is_kept = self._on_policy and all(g.is_kept for g in graded)
        is_ready = is_kept or not self.tower_trains
        features = join_features([g.features for g in graded] if is_ready else self.vlm.encode(prompts))
        row = pack(trees).to(self.vlm.device)
        ref_logprobs = None
        if self.config.beta > 0:
            with torch.no_grad(), self.vlm.as_reference():  # which sees with its own tower
                seen = join_features(self.vlm.encode(prompts)) if self.tower_trains else features
                ref_logprobs = self.vlm.logprobs(row, seen)
        logprobs = self.vlm.logprobs(row, features)
        if self._on_policy and not self._agreed:
            self._check_agreement(logprobs.detach(), row)
        if features is not None and not self._sighted:
            self._check_sight(logprobs.detach(), row)
        loss = policy_loss(logprobs, row.old_logprobs, ref_logprobs, row.advantages, row.weights, self.config)
        loss.loss.backward()
        return {**loss.sums, "loss": loss.loss.detach()}

    def _check_agreement(self, logprobs: Tensor, row: TreePack) -> None:
        """Once, before an update: rollout and update agree on the log-probabilities of what was sampled."""
        self._agreed = True
        gap = float((logprobs - row.old_logprobs).abs().max())
        exact = self.vlm.autocast is None and logprobs.dtype == torch.float32
        assert not exact or gap < 1e-2, (
            f"log-probabilities of rollout and update differ by {gap}: the tree rule is broken"
        )

    def _check_sight(self, logprobs: Tensor, row: TreePack) -> None:
        """Once, for the first row with an image: its negative has other log-probabilities."""
        self._sighted = True
        negatives = [replace(p, pixels=_negative(p.pixels)) for p in row.prompts]
        with torch.no_grad():
            others = self.vlm.logprobs(row, join_features(self.vlm.encode(negatives)))
        if torch.equal(others, logprobs):
            raise UserError(
                "the log-probabilities do not change when the image does: the model does not look at its images. Check "
                "that `model` is a vision-language checkpoint whose tower and projector were trained"
            )


def _negative(pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: -value if name == "pixel_values" else value for name, value in pixels.items()}


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for every step and rank, so that a resumed run draws what an unbroken one would have drawn."""
    return (seed * 1_000_003 + step) * 4_099 + rank


def _rows(graded: Sequence[Graded]) -> list[RolloutRow]:
    rows = []
    for g in graded:
        tree = g.scored.tree
        for i, thought in enumerate(tree.thoughts):
            for j, answer in enumerate(thought.answers):
                reward = g.scored.rewards[i][j]
                rows.append(
                    RolloutRow(
                        tree.prompt.sample.id,
                        tree.prompt.text,
                        thought.text,
                        g.scored.answers[i][j],
                        answer.text,
                        None if reward is None else reward.value,
                        float(g.advantages.thoughts[i]),
                        float(g.advantages.answers[i, j]),
                        {} if reward is None else dict(reward.parts),
                        tree.prompt.sample.task,
                    )
                )
    return rows
