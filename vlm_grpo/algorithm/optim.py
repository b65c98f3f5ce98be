"""The optimiser step: learning rate schedule, gradient clipping, and skipping of gradients that are not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn
from torch.optim import AdamW

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes


@dataclass
class OptimConfig:
    """AdamW and its schedule."""

    ROOM = "algorithm"

    # Peak learning rate
    learning_rate: Annotated[float, Range(at_least=0, below=math.inf)] = 2e-4
    # Shape of the learning rate after the warm-up; linear and cosine end at 0
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    # Steps over which the learning rate rises linearly from 0
    warmup_steps: Annotated[int, Range(at_least=0)] = 0
    # A step multiplies matrices by 1 - learning_rate * weight_decay; biases and norms are spared
    weight_decay: Annotated[float, Range(at_least=0, below=math.inf)] = 0.0
    # Decay of AdamW's mean of gradients
    adam_beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    # Decay of AdamW's mean of squared gradients
    adam_beta2: Annotated[float, Range(at_least=0, below=1)] = 0.999
    # The global gradient norm is clipped to this
    max_grad_norm: Annotated[float, Range(above=0)] = 1.0
    # A step whose loss or gradient is not finite is skipped; more than this many stop the run
    max_skipped_steps: Annotated[int, Range(at_least=0)] = 10


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of `step`, from 1 to max_steps.

    >>> config = OptimConfig(learning_rate=1.0, lr_scheduler="linear", warmup_steps=2)
    >>> [learning_rate(config, step, 6) for step in (1, 2, 3, 6)]
    [0.5, 1.0, 1.0, 0.25]
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.learning_rate * factor[config.lr_scheduler]


class Optimizer:
    """AdamW over the trainable weights. Weight decay acts on matrices only."""

    def __init__(self, model: nn.Module, config: OptimConfig, processes: Processes) -> None:
        self.config = config
        self.processes = processes
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not self.named:
            raise UserError("no weight of the model trains: see freeze_vision and lora_r")
        decayed = [p for _, p in self.named if p.ndim >= 2]
        rest = [p for _, p in self.named if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        betas = (config.adam_beta1, config.adam_beta2)
        self.adamw = AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=betas, foreach=True)
        self.skipped_steps = 0
        self._checked = False

    def step(self, learning_rate: float, frozen_grad: Sequence[str] = ()) -> float:
        """Sum the gradients over all ranks, clip them, step and clear them; returns the global norm before clipping.

        A step whose norm is not finite is skipped. `frozen_grad` are prefixes of the names of weights that may have no
        gradient.

        Raises: UserError if more than `max_skipped_steps` steps were skipped, or if other weights got no gradient in
        the first step.
        """
        parameters = [p for _, p in self.named]
        if not self._checked:
            self._check_reached(frozen_grad)
        if not any(self.processes.gather([any(p.grad is not None for p in parameters)])):
            return 0.0  # no gradient on any process: neither momentum nor decay moves the weights
        self.processes.sum_gradients(parameters)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm, foreach=True))
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate
            self.adamw.step()
        else:
            self._skip(norm)
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def _skip(self, norm: float) -> None:
        self.skipped_steps += 1
        if self.skipped_steps > self.config.max_skipped_steps:
            raise UserError(
                f"{self.skipped_steps} steps were skipped because loss or gradient was not finite (now {norm}); "
                "lower learning_rate, or allow more with max_skipped_steps"
            )

    def _check_reached(self, allowed: Sequence[str]) -> None:
        reached = [{n for n, p in self.named if p.grad is not None}]
        every = set().union(*self.processes.gather(reached))
        missed = [n for n, _ in self.named if n not in every and not n.startswith(tuple(allowed))]
        self._checked = bool(every)
        if every and missed:
            raise UserError(
                f"{len(missed)} trainable weights got no gradient in the first step, {missed[0]} among them: the loss "
                "does not depend on them; with a vision tower that reads no image set freeze_vision=true"
            )
