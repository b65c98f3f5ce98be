"""Which samples a step sees, and what happens to those that cannot be read."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.prefetch import Prefetch
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task.interface import Sample, Tasks, by_name
from vlm_grpo.tree.types import Prompt


@dataclass
class DataConfig:
    """Samples and prompts."""

    ROOM = "task and data"

    # Split that is trained on; where several tasks are named: of all of them, or a list in their order
    train_split: str | list[str] = "train"
    # Use only the first so many samples of the split (of each task's); none: all
    max_samples: Annotated[int | None, Range(at_least=1)] = None
    # A sample whose image cannot be read: stop, or leave it out, count it and say which
    on_bad_sample: Literal["error", "skip"] = "error"
    # A prompt of more than max_prompt_length tokens: stop, or leave it out and count it; it is never cut
    on_long_prompt: Literal["error", "skip"] = "error"
    # Most tokens of a prompt, image tokens included; none: what the model's context leaves for thought and answer
    max_prompt_length: Annotated[int | None, Range(at_least=1)] = None
    # Threads that read the next step's images and questions while this step computes; 0: they are read when they are
    # needed. It changes no number
    dataloader_num_workers: Annotated[int, Range(at_least=0)] = 0


MAX_UNUSED = 256  # samples that a run draws before the first that it can use


@dataclass
class Skipped:
    """Samples that were left out, by reason."""

    bad: int = 0
    long: int = 0
    messages: list[str] = field(default_factory=list)
    first: str = ""  # of all messages

    def add_message(self, message: str) -> None:
        self.first = self.first or message
        self.messages.append(message)

    def take_messages(self) -> list[str]:
        """Which samples and why, since the last call."""
        taken, self.messages = self.messages, []
        return taken


def skip_counts(skipped: Skipped, processes: Processes) -> dict[str, float]:
    """How many samples were left out so far, over all processes."""
    every = processes.gather([(skipped.bad, skipped.long)])
    return {
        "skipped_bad_samples": float(sum(bad for bad, _ in every)),
        "skipped_long_prompts": float(sum(long for _, long in every)),
    }


def check_used(skipped: Skipped, metrics: Mapping[str, float], num_drawn: int, total: int, is_last: bool) -> None:
    """Raise UserError if none of a run's `num_drawn` samples could be used, and these are all of `total`, or enough to
    tell, or the run ends here. `metrics` hold the `skip_counts`.
    """
    bad, long = metrics["skipped_bad_samples"], metrics["skipped_long_prompts"]
    if bad + long < num_drawn or not (is_last or num_drawn >= min(total, MAX_UNUSED)):
        return
    counts = {"on_bad_sample=skip": bad, "on_long_prompt=skip": long}
    said = " and ".join(f"{option} left out {count:.0f}" for option, count in counts.items() if count)
    hint = "; raise max_prompt_length or lower max_pixels" if long else ""
    raise UserError(f"no sample could be used, so nothing is learnt: {said}. The first: {skipped.first}{hint}")


class PromptReader:
    """Samples to prompts, with the user's choice about samples that are bad or too long. Use as a context manager, or
    call `close`, where there are workers.
    """

    def __init__(self, prompts: PromptBuilder, tasks: Tasks, config: DataConfig, max_prompt_length: int) -> None:
        self.tasks, self.config = by_name(tasks), config
        self.limit = max_prompt_length
        self.skipped = Skipped()
        coordinates = {name: task.coordinates for name, task in self.tasks.items()}
        self._prefetch = Prefetch(prompts, partial(_read_prompt, coordinates), config.dataloader_num_workers)

    def expect(self, samples: Iterable[Sample]) -> None:
        """These very samples will be read next, in this order: workers may begin. What is wrong with one of them is
        said, and counted, when it is read.
        """
        self._prefetch.begin(samples)

    def read(self, samples: Sequence[Sample]) -> list[Prompt]:
        """The prompts of the samples that can be used, in order; a skipped one is never replaced by another.

        Raises: UserError, naming the sample, for one that cannot be used and may not be skipped.
        """
        prompts = [self._accept(sample, self._prefetch.take(sample)) for sample in samples]
        return [prompt for prompt in prompts if prompt is not None]

    def read_batches(self, batches: Iterable[Sequence[Sample]]) -> Iterator[list[Prompt]]:
        """The prompts of one batch after the other, those of the next being read while these are used."""
        if self.config.dataloader_num_workers == 0:
            yield from map(self.read, batches)
            return
        expected: deque[Sequence[Sample]] = deque()
        for samples in batches:
            self.expect(samples)
            expected.append(samples)
            if len(expected) > 1:
                yield self.read(expected.popleft())
        yield from map(self.read, expected)

    def close(self) -> None:
        """End the workers."""
        self._prefetch.close()

    def __enter__(self) -> "PromptReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, sample: Sample, prompt: Prompt | UserError) -> Prompt | None:
        if isinstance(prompt, UserError):
            if self.config.on_bad_sample == "error":
                raise prompt
            self.skipped.bad += 1
            self.skipped.add_message(str(prompt))
            return None
        if len(prompt.ids) <= self.limit:
            return prompt
        message = f"sample {sample.id!r}: the prompt has {len(prompt.ids)} tokens, more than {self.limit}"
        if self.config.on_long_prompt == "error":
            raise UserError(f"{message}; raise max_prompt_length, lower max_pixels, or set on_long_prompt=skip")
        self.skipped.long += 1
        self.skipped.add_message(message)
        return None


def _read_prompt(coordinates: Mapping[str, bool], prompts: PromptBuilder, sample: Sample) -> Prompt | UserError:
    """The prompt, or what is wrong with the sample. `coordinates`: which tasks have them."""
    try:
        return prompts.build(sample, coordinates[sample.task])
    except UserError as error:
        return error


def epoch_indices(total: int, first: int, count: int, seed: int) -> list[int]:
    """Indices of `count` draws after the first `first`: epochs are shuffled anew, draws run on across their borders.

    A function of its arguments alone, so that a resumed run goes on with the very next prompt.

    >>> sorted(epoch_indices(4, 0, 2, seed=0) + epoch_indices(4, 2, 2, seed=0))
    [0, 1, 2, 3]
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(first + len(indices), total)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        indices.extend(order[offset : offset + count - len(indices)].tolist())
    return indices
