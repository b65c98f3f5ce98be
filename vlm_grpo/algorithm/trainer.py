"""GRPO-MA: one step from samples to better weights, reading as `encode, grow, score, compare, update`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from peft import PeftModel

from vlm_grpo.algorithm.diagnostics import DiagnosticsConfig, SpikeScore, matching_layers, measure_gradient
from vlm_grpo.algorithm.grading import grade, penalty_metrics, scale_step
from vlm_grpo.algorithm.loss import SUMS, loss_metrics
from vlm_grpo.algorithm.minibatch import Graded, ObjectiveConfig, prepare
from vlm_grpo.algorithm.optim import OptimConfig, Optimizer, learning_rate
from vlm_grpo.algorithm.reference import ReferenceConfig
from vlm_grpo.algorithm.stats import RolloutRow, branch_metrics, resample_metrics, rollout_rows, step_metrics
from vlm_grpo.algorithm.update import RowUpdate
from vlm_grpo.common.clock import Clock
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import PromptReader, skip_counts
from vlm_grpo.model.features import Features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.rewards import RewardWorkers, ScoreConfig, ScoredTree, score_trees
from vlm_grpo.rollout.sampling import SEEDS, Sampler, sampler
from vlm_grpo.task.interface import Sample, Tasks, by_name
from vlm_grpo.tree.pack import fill_rows, packed_length
from vlm_grpo.tree.types import Prompt

PATCH_VALUES = 2 * 3 * 14 * 14  # numbers in the pixels of a patch, by which patches are counted


@dataclass
class StepConfig(DiagnosticsConfig, OptimConfig, ReferenceConfig, ObjectiveConfig, ScoreConfig):
    """One training step."""

    ROOM = "algorithm"

    # Seed of the order of samples and of all sampling
    seed: Annotated[int, SEEDS] = 0
    # Steps of the run
    max_steps: Annotated[int, Range(at_least=1)] = 240
    # Prompts whose trees are grown in one step, over all processes
    prompts_per_step: Annotated[int, Range(at_least=1)] = 16
    # Prompts of one optimiser step; none: all of the step's
    prompts_per_minibatch: Annotated[int | None, Range(at_least=1)] = None
    # Passes over the step's rollouts
    num_iterations: Annotated[int, Range(at_least=1)] = 1
    # Trees are packed into rows of at most so many tokens; a longer tree has a row of its own
    max_tokens_per_row: Annotated[int, Range(at_least=1)] = 2048


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for its reader; metrics are over all processes, rows are this process's."""

    metrics: dict[str, float]
    rows: list[RolloutRow]
    num_tokens: int  # sampled, over all processes


class Trainer:
    """Owns the engine and the optimiser; the model, the task or tasks, and the processes are given.

    A step, by the methods that do its parts:

        Sample ─▶ Prompt ─▶ rollout ─▶ score ─▶ advantages      _grow
        pack ─▶ logprobs ─▶ policy_loss ─▶ gradient             backward, which takes the trees row by row
        optimiser                                               update, which goes through the minibatches
    """

    def __init__(self, vlm: VLM, tasks: Tasks, reader: PromptReader, config: StepConfig, processes: Processes) -> None:
        has_adapter = isinstance(vlm.model, PeftModel)
        assert not (config.sync_ref_model and has_adapter), "a reference that is the model without its adapter moves"
        self.vlm, self.tasks, self.reader = vlm, by_name(tasks), reader
        self.workers = RewardWorkers(tasks)
        self.config, self.processes = config, processes
        self.optimizer = Optimizer(vlm.model, config, processes)
        self.layers = matching_layers(self.optimizer.named, config.layer_patterns)
        self.spikes = SpikeScore()
        self.engine = Engine(vlm, config)
        self.row_update = RowUpdate(vlm, config)

    def step(
        self, number: int, samples: Sequence[Sample], spares: Callable[[int], Sequence[Sample]] | None = None
    ) -> StepResult:
        """Step 1, 2, …: the samples of all processes are given, each process works on its own share.

        `spares` gives other samples in their places, for each time that dynamic_sampling=resample asks again: 0, 1, …
        """
        config, clock, timeouts = self.config, Clock(self.vlm.device), self.workers.timeouts
        seed = step_seed(config.seed, number, self.processes.rank)
        draw = sampler(config, torch.Generator(self.vlm.device).manual_seed(seed))
        graded = self._grow(samples, self.processes.share(len(samples)), draw, clock)
        graded, replaced = self._resample(graded, spares, draw, clock)
        graded = scale_step(graded, config, self.processes)
        looked: dict[str, float] = {}
        if config.diagnostics_every and number % config.diagnostics_every == 0:
            with clock.phase("diagnostics"):
                looked = self.diagnose(graded)
        with clock.phase("update"):
            updated = self.update(graded, len(samples), learning_rate(config, number, config.max_steps))
        if config.sync_ref_model and number % config.ref_model_sync_steps == 0:
            self.vlm.mix_reference(config.ref_model_mixup_alpha)
        times = clock.metrics()
        trees = [(g.scored, g.advantages) for g in graded]
        metrics = step_metrics(trees, self.processes, list(self.tasks)) | updated | looked | times
        metrics |= self._left_out(timeouts)
        metrics |= self._option_metrics(graded, replaced)
        num_tokens = metrics["num_tokens"] + metrics.get("resampled_tokens", 0.0)
        return StepResult(metrics, rollout_rows(trees), int(num_tokens))

    def _grow(self, samples: Sequence[Sample], places: Sequence[int], draw: Sampler, clock: Clock) -> list[Graded]:
        """Trees of the samples in these places, scored and compared; a sample that is skipped has none."""
        with clock.phase("encode"):
            read = [(place, prompt) for place in places for prompt in self.reader.read([samples[place]])]
            prompts = [prompt for _, prompt in read]
            features = self._encode(prompts)
        with clock.phase("rollout"):
            trees = self.engine.rollout(prompts, features, draw)
        clock.add(self.engine.seconds)
        with clock.phase("reward"):
            scored = score_trees(self.workers, trees, self.config)
            kept = [place for place, _ in read]
            return grade(self.vlm, scored, features, kept, self.config, self.config.max_tokens_per_row)

    def _encode(self, prompts: Sequence[Prompt]) -> list[Features | None]:
        """Image features of each prompt for its rollout; those of a trainable tower with their graph, for the first
        update, as long as the patches are no more than the tokens of a row, whose activations take memory likewise.
        """
        kept: list[Features | None] = []
        patches = 0
        for prompt in prompts if self.row_update.tower_trains else ():
            patches += prompt.pixels["pixel_values"].numel() // PATCH_VALUES if prompt.pixels else 0
            if patches > self.config.max_tokens_per_row:
                break
            kept += self.vlm.encode([prompt])
        with torch.no_grad():
            return kept + self.vlm.encode(prompts[len(kept) :])

    def _resample(
        self,
        graded: list[Graded],
        spares: Callable[[int], Sequence[Sample]] | None,
        draw: Sampler,
        clock: Clock,
    ) -> tuple[list[Graded], list[ScoredTree]]:
        """With dynamic_sampling=resample the trees, other samples' in place of those that teach nothing, and the
        replaced ones.
        """
        if self.config.dynamic_sampling != "resample":
            return graded, []
        assert spares is not None, "dynamic_sampling=resample needs spare samples"
        by_place = {g.place: g for g in graded}
        replaced: list[ScoredTree] = []
        for attempt in range(self.config.max_resamples):
            flat = [place for place, g in by_place.items() if g.advantages.has_zero_variance]
            if not flat:
                break
            for fresh in self._grow(spares(attempt), flat, draw, clock):
                replaced.append(by_place[fresh.place].scored)
                by_place[fresh.place] = fresh
        return list(by_place.values()), replaced

    def update(self, graded: Sequence[Graded], num_samples: int, rate: float) -> dict[str, float]:
        """All optimiser steps on a step's rollouts; gives back loss metrics over all of them."""
        size = self.config.prompts_per_minibatch or num_samples
        totals: dict[str, float] = {}
        norms: list[float] = []
        scores: list[float] = []
        for _ in range(self.config.num_iterations):
            for first in range(0, num_samples, size):
                batch = [g for g in graded if first <= g.place < first + size]
                sums = self.backward(batch, on_policy=not norms)
                every = self.processes.gather([sums])
                for name in sums:
                    totals[name] = totals.get(name, 0.0) + sum(part[name] for part in every)
                norms.append(self.optimizer.step(rate, self.vlm.family.vision_modules))
                scores.append(self.spikes.add(norms[-1]))
        metrics = loss_metrics(totals, self.config) | {"loss": totals["loss"] / len(norms), "learning_rate": rate}
        metrics |= {"grad_norm": sum(norms) / len(norms), "grad_spike_share": self.spikes.share}
        return metrics | {"grad_spike_score": max((s for s in scores if math.isfinite(s)), default=math.nan)}

    def backward(self, batch: Sequence[Graded], on_policy: bool) -> dict[str, float]:
        """Add this process's share of one minibatch's gradient to the weights; gives back sums over its tokens.

        The denominators are of the whole minibatch over all processes, so no split of it changes the gradient.
        `on_policy`: the weights are those that the trees were sampled with.
        """
        prepared = prepare(batch, self.config, self.processes)
        lengths = [packed_length(tree) for tree in prepared.segments]
        rows = [prepared.only(sorted(row)) for row in fill_rows(lengths, self.config.max_tokens_per_row)]
        totals: dict[str, float] = dict.fromkeys((*SUMS, "loss"), 0.0)
        # Kept graphs first, so that their memory is free again
        for row in sorted(rows, key=lambda row: not row.is_kept):
            sums = self.row_update.backward(row, on_policy)
            totals = {name: totals[name] + float(value) for name, value in sums.items()}
        return totals

    def diagnose(self, graded: Sequence[Graded]) -> dict[str, float]:
        """What the gradient of all the step's trees looks like before its first update, which it leaves as it was."""
        prepared = prepare(graded, self.config, self.processes)

        def backward(index: int, of_answers: bool) -> None:
            tree = prepared.segments[index]
            inner = {s.parent for s in tree}  # answers are the leaves
            part = [s if (i not in inner) == of_answers else replace(s, weight=0.0) for i, s in enumerate(tree)]
            # The graphs that were kept are the update's
            self.row_update.backward(replace(prepared.only([index]), segments=[part]), on_policy=False)

        count = sum(self.processes.gather([len(graded)]))
        own = len(prepared.graded)
        return measure_gradient(self.optimizer.named, self.layers, own, count, backward, self.processes)

    def _left_out(self, timeouts: int) -> dict[str, float]:
        """Optimiser steps and samples skipped so far, and rewards given up beyond the `timeouts` before this step."""
        return {
            "skipped_steps": float(self.optimizer.skipped_steps),
            **skip_counts(self.reader.skipped, self.processes),
            "reward_timeouts": float(sum(self.processes.gather([self.workers.timeouts - timeouts]))),
        }

    def _option_metrics(self, graded: Sequence[Graded], replaced: Sequence[ScoredTree]) -> dict[str, float]:
        """Metrics that only some options have."""
        metrics = penalty_metrics(graded, self.config, self.processes)
        if self.config.num_levels > 2:
            metrics |= branch_metrics([g.scored.tree for g in graded], self.processes)
        if self.config.dynamic_sampling == "resample":
            metrics |= resample_metrics([g.scored for g in graded], replaced, self.processes)
        return metrics


def step_seed(seed: int, step: int, rank: int) -> int:
    """A seed of its own for every step and rank, so that a resumed run draws what an unbroken one would have drawn."""
    return (seed * 1_000_003 + step) * 4_099 + rank
