"""GRPO-MA: one step from samples to better weights, reading as `encode, grow, score, compare, update`.

Letters: K thoughts, M answers, Q scored tokens.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from vlm_grpo.advantage import Advantages, check_advantage_options
from vlm_grpo.branching import check_branching_options
from vlm_grpo.config import refuse_idle
from vlm_grpo.data import PromptReader, check_run_seed, skip_counts
from vlm_grpo.diagnostics import (
    DiagnosticsConfig,
    SpikeScore,
    check_diagnostics_options,
    matching_layers,
    measure_gradient,
)
from vlm_grpo.engine import Engine
from vlm_grpo.errors import UserError
from vlm_grpo.features import Features, join_features
from vlm_grpo.grading import grade, penalty_metrics, scale_step
from vlm_grpo.loss import SUMS, loss_metrics
from vlm_grpo.metrics import RolloutRow
from vlm_grpo.minibatch import (
    Graded,
    ObjectiveConfig,
    count_active,
    minibatch_of,
    row_loss,
    segments_of,
    teaches,
    with_top_entropies,
)
from vlm_grpo.objectives import check_loss_options
from vlm_grpo.optim import OptimConfig, Optimizer, check_optim_options, learning_rate
from vlm_grpo.processes import Processes
from vlm_grpo.reference import ReferenceConfig, check_reference_options
from vlm_grpo.rollout import Prompt
from vlm_grpo.sampling import Sampler, check_sampling_options, sampler
from vlm_grpo.scorer import Judges, ScoreConfig, ScoredTree, check_score_options, score_trees
from vlm_grpo.shaping import check_shaping_options
from vlm_grpo.stats import branch_metrics, resample_metrics, step_metrics
from vlm_grpo.task import Sample, Tasks, by_name
from vlm_grpo.tree import Segment, TreePack, fill_rows, pack, packed_length
from vlm_grpo.vlm import VLM

PATCH_VALUES = 2 * 3 * 14 * 14  # numbers in the pixels of a patch, by which patches are counted


@dataclass
class StepConfig(DiagnosticsConfig, OptimConfig, ReferenceConfig, ObjectiveConfig, ScoreConfig):
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
    check_advantage_options(config, config.num_answers, config.num_levels)
    check_score_options(config)
    check_loss_options(config)
    check_sampling_options(config)
    check_branching_options(config, config.max_thought_length)
    check_reference_options(config, config.beta)
    check_shaping_options(config, config.advantage, config.max_thought_length + config.max_answer_length)
    check_diagnostics_options(config)
    check_run_seed(config.seed)
    for name in ("max_steps", "prompts_per_step", "num_iterations", "max_tokens_per_row"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)}: must be at least 1")
    check_optim_options(config, config.max_steps)
    if config.prompts_per_minibatch is not None and config.prompts_per_minibatch < 1:
        raise UserError(f"prompts_per_minibatch={config.prompts_per_minibatch}: must be at least 1")
    if config.loss_type == "gpg" and config.num_iterations > 1:
        raise UserError(
            f"num_iterations={config.num_iterations} with loss_type=gpg: after the first pass the rollouts are another "
            "policy's, and this loss has no ratio to make up for it: use num_iterations=1, or loss_type=dapo or cispo"
        )
    if config.mask_truncated_completions and config.ignore_eos:
        raise UserError("mask_truncated_completions=true with ignore_eos=true leaves nothing to train: all are cut")
    if config.credit == "sequence":
        reason = "with credit=sequence, where thought and answer are one: there is no thoughts' term beside theirs"
        refuse_idle(config, ["answer_weight"], reason)
    is_alone = config.num_thoughts == 1 and config.num_levels == 2 and config.advantage != "reinforce"
    if is_alone and (config.num_answers == 1 or config.answer_weight == 0):
        other = "num_answers=1" if config.num_answers == 1 else "answer_weight=0"
        raise UserError(
            f"num_thoughts=1 with {other} leaves nothing to compare: raise one of them, or set advantage=reinforce"
        )


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
        self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add to phases whose time was taken elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


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
        check_reference_options(config, config.beta, has_adapter=isinstance(vlm.model, PeftModel))
        self.vlm, self.tasks, self.reader = vlm, by_name(tasks), reader
        self.judges = Judges(tasks)
        self.config, self.processes = config, processes
        self.optimizer = Optimizer(vlm.model, config, processes)
        self.layers = matching_layers(self.optimizer.named, config.layer_patterns)
        self.spikes = SpikeScore()
        self.engine = Engine(vlm, config)
        self.tower_trains = vlm.tower_trains
        self._on_policy = True  # the weights are those that the present trees were sampled with
        self._agreed = self._sighted = False
        self._num_entropies = 1  # of the present minibatch

    def step(
        self, number: int, samples: Sequence[Sample], spares: Callable[[int], Sequence[Sample]] | None = None
    ) -> StepResult:
        """Step 1, 2, …: the samples of all processes are given, each process works on its own share.

        `spares` gives other samples in their places, for each time that dynamic_sampling=resample asks again: 0, 1, …
        """
        start, clock, device = time.perf_counter(), Clock(), self.vlm.device
        generator = torch.Generator(device).manual_seed(step_seed(self.config.seed, number, self.processes.rank))
        draw, timeouts = sampler(self.config, generator), self.judges.timeouts
        graded = self._grow(samples, self.processes.share(len(samples)), draw, clock)
        replaced: list[ScoredTree] = []
        if self.config.dynamic_sampling == "resample":
            assert spares is not None, "dynamic_sampling=resample needs spare samples"
            graded, replaced = self._resample(graded, spares, draw, clock)
        graded = scale_step(graded, self.config, self.processes)
        seen: dict[str, float] = {}
        if self.config.diagnostics_every and number % self.config.diagnostics_every == 0:
            with clock.phase("diagnostics", device):
                seen = self.diagnose(graded)
        with clock.phase("update", device):
            sums = self.update(graded, len(samples), learning_rate(self.config, number, self.config.max_steps))
        if self.config.sync_ref_model and number % self.config.ref_model_sync_steps == 0:
            self.vlm.mix_reference(self.config.ref_model_mixup_alpha)
        facts = {**clock.seconds, "step": time.perf_counter() - start}
        metrics = (
            step_metrics([(g.scored, g.advantages) for g in graded], self.processes, list(self.tasks)) | sums | seen
        )
        metrics |= {f"time/{name}": seconds for name, seconds in facts.items() if name != "step"}
        metrics |= {"step_time": facts["step"], "skipped_steps": float(self.optimizer.skipped_steps)}
        metrics |= skip_counts(self.reader.skipped, self.processes)
        metrics["reward_timeouts"] = float(sum(self.processes.gather([self.judges.timeouts - timeouts])))
        metrics |= penalty_metrics(graded, self.config, self.processes)
        if self.config.num_levels > 2:
            metrics |= branch_metrics([g.scored.tree for g in graded], self.processes)
        if self.config.dynamic_sampling == "resample":
            metrics |= resample_metrics([g.scored for g in graded], replaced, self.processes)
        num_tokens = metrics["num_tokens"] + metrics.get("resampled_tokens", 0.0)
        return StepResult(metrics, _rows(graded), int(num_tokens))

    def _grow(self, samples: Sequence[Sample], places: Sequence[int], draw: Sampler, clock: Clock) -> list[Graded]:
        """Trees of the samples in these places, scored and compared; a sample that is skipped has none."""
        device = self.vlm.device
        with clock.phase("encode", device):
            read = [(place, prompt) for place in places for prompt in self.reader.read([samples[place]])]
            prompts = [prompt for _, prompt in read]
            features = self._encode(prompts)
        with clock.phase("rollout", device):
            trees = self.engine.rollout(prompts, features, draw)
        clock.add(self.engine.seconds)
        with clock.phase("reward", device):
            scored = score_trees(self.judges, trees, self.config)
            kept = [place for place, _ in read]
            return grade(self.vlm, scored, features, kept, self.config, self.config.max_tokens_per_row)

    def _resample(
        self, graded: Sequence[Graded], spares: Callable[[int], Sequence[Sample]], draw: Sampler, clock: Clock
    ) -> tuple[list[Graded], list[ScoredTree]]:
        """The trees, other samples' in place of those that teach nothing, and the replaced ones."""
        by_place = {g.place: g for g in graded}
        replaced: list[ScoredTree] = []
        for attempt in range(self.config.max_resamples):
            silent = [place for place, g in by_place.items() if g.advantages.is_silent]
            if not silent:
                break
            for fresh in self._grow(spares(attempt), silent, draw, clock):
                replaced.append(by_place[fresh.place].scored)
                by_place[fresh.place] = fresh
        return list(by_place.values()), replaced

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
        scores: list[float] = []
        self._on_policy = True
        for _ in range(self.config.num_iterations):
            for first in range(0, num_samples, size):
                batch = [g for g in graded if first <= g.place < first + size]
                sums = self.backward(batch)
                every = self.processes.gather([sums])
                for name in sums:
                    totals[name] = totals.get(name, 0.0) + sum(part[name] for part in every)
                norms.append(self.optimizer.step(rate, self.vlm.family.vision_modules))
                scores.append(self.spikes.add(norms[-1]))
                self._on_policy = False
        metrics = loss_metrics(totals, self.config) | {"loss": totals["loss"] / len(norms), "learning_rate": rate}
        metrics |= {"grad_norm": sum(norms) / len(norms), "grad_spike_share": self.spikes.share}
        return metrics | {"grad_spike_score": max((s for s in scores if math.isfinite(s)), default=math.nan)}

    def diagnose(self, graded: Sequence[Graded]) -> dict[str, float]:
        """What the gradient of all the step's trees looks like before its first update, which it leaves as it was."""
        chosen, trees = self._taught(graded)
        self._on_policy = False  # the graphs that were kept are the update's

        def backward(index: int, of_answers: bool) -> None:
            inner = {s.parent for s in trees[index]}  # answers are the leaves
            part = [s if (i not in inner) == of_answers else replace(s, weight=0.0) for i, s in enumerate(trees[index])]
            self._backward_row([part], [chosen[index]])

        count = sum(self.processes.gather([len(graded)]))
        return measure_gradient(self.optimizer.named, self.layers, len(chosen), count, backward, self.processes)

    def backward(self, batch: Sequence[Graded]) -> dict[str, float]:
        """Add this process's share of one minibatch's gradient to the weights; gives back sums over its tokens.

        The denominators are of the whole minibatch over all processes, so no split of it changes the gradient.
        """
        chosen, trees = self._taught(batch)
        totals: dict[str, float] = dict.fromkeys((*SUMS, "loss"), 0.0)
        rows = fill_rows([packed_length(tree) for tree in trees], self.config.max_tokens_per_row)
        # Kept graphs first, so that their memory is free again
        for row in sorted(map(sorted, rows), key=lambda row: not all(chosen[i].is_kept for i in row)):
            sums = self._backward_row([trees[i] for i in row], [chosen[i] for i in row])
            totals = {name: totals[name] + float(value) for name, value in sums.items()}
        return totals

    def _taught(self, batch: Sequence[Graded]) -> tuple[list[Graded], list[list[Segment]]]:
        """The trees of a minibatch that add to its gradient, with their segments' weights."""
        config, processes = self.config, self.processes
        minibatch = minibatch_of(batch, config, processes)
        trees = [segments_of(g, minibatch, config) for g in batch]
        if config.top_entropy_quantile < 1:
            trees = with_top_entropies(batch, trees, config.top_entropy_quantile, processes)
        self._num_entropies = count_active(trees, config, processes) if config.entropy_coef > 0 else 1
        chosen = [i for i, g in enumerate(batch) if self._teaches(g.advantages)]
        return [batch[i] for i in chosen], [trees[i] for i in chosen]

    def _teaches(self, advantages: Advantages) -> bool:
        return teaches(advantages, self.config)

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
        if self.config.beta > 0 and self.config.kl_in == "loss":
            with torch.no_grad(), self.vlm.as_reference():  # which sees with its own tower
                seen = join_features(self.vlm.encode(prompts)) if self.tower_trains else features
                ref_logprobs = self.vlm.logprobs(row, seen)
        entropies = None
        if self.config.entropy_coef > 0:
            logprobs, entropies = self.vlm.logprobs_and_entropies(row, features)
        else:
            logprobs = self.vlm.logprobs(row, features)
        if self._on_policy and not self._agreed:
            self._check_agreement(logprobs.detach(), row)
        if features is not None and not self._sighted:
            self._check_sight(logprobs.detach(), row)
        loss = row_loss(row, logprobs, ref_logprobs, entropies, self._num_entropies, self.config)
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
