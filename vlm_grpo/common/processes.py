"""The processes of a run: one, or several started by `accelerate launch`. All collective calls are in this module.

Each rank works on its own prompts and never waits for another rank inside a rollout. Ranks communicate only to sum
gradients and to collect records.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import distributed, nn

from vlm_grpo.common.errors import PeerError, UserError

BUCKET_ELEMENTS = 2**24  # of gradients summed in one call: 64 MiB in float32


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them. A single process is rank 0 of 1 and never communicates."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Indices of the work items that this process takes, out of `count`."""
        return range(self.rank, count, self.count)

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks in the order of the ranks. Every rank must call it and gets the same list."""
        if self.count == 1:
            return items
        with _collective():
            return gather_object(items)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient, on every rank, by its sum over all ranks.

        A missing gradient counts as zero, so a rank may have had no work that touches a parameter.
        """
        if self.count == 1:
            return
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and (size + parameter.numel() > BUCKET_ELEMENTS or parameter.dtype != bucket[0].dtype):
                _sum_bucket(bucket)
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.numel()
        if bucket:
            _sum_bucket(bucket)

    def wait(self) -> None:
        """Return when all ranks have called this method."""
        if self.count > 1:
            with _collective():
                distributed.barrier()


@contextmanager
def _collective() -> Iterator[None]:
    """A context for one collective call: the RuntimeError of a lost process becomes a PeerError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerError(str(error)) from error


def _sum_bucket(bucket: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in bucket if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    with _collective():
        distributed.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def start_processes() -> Processes:
    """Join the processes that the launcher started.

    Raises: UserError if the launcher's settings would shard the model, or if its processes do not know each other.
    PeerError if another process ends meanwhile.
    """
    try:
        accelerator = Accelerator(cpu=not torch.cuda.is_available())
    except distributed.DistError as error:
        raise PeerError(str(error)) from error
    sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if accelerator.distributed_type in sharded:
        raise UserError(
            f"the launcher asks for {accelerator.distributed_type.value}, and this trainer keeps a whole model in "
            "every process: use --multi_gpu, and lora_r or gradient_checkpointing=true for models that do not fit"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise UserError(
            f"the launcher started {world} processes, but they do not see each other: start them with "
            "`accelerate launch --multi_gpu --num_processes N` (also on CPU), or set "
            "ACCELERATE_USE_CPU=true for torchrun"
        )
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator.device)
