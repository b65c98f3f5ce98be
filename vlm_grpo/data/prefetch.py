"""Threads that read prompts ahead of the time when they are asked for.

What can be read does not depend on when it is: a thread only moves work to another moment. Processors and tokenizers
are not to be used by two threads at once, so each thread has copies of its own.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.task.interface import Sample

Outcome = TypeVar("Outcome")


class Prefetch(Generic[Outcome]):
    """Owns the threads and what they have begun to read, in the order in which it will be taken."""

    def __init__(
        self, prompts: PromptBuilder, read: Callable[[PromptBuilder, Sample], Outcome], num_workers: int
    ) -> None:
        """`read` reads a sample by a prompt builder. With 0 workers it is called when a sample is taken."""
        self._prompts, self._read, self._num_workers = prompts, read, num_workers
        self._begun: deque[tuple[Sample, Future[Outcome]]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, samples: Iterable[Sample]) -> None:
        """Read these as soon as a thread is free; they are taken later, all of them and in this order."""
        if self._num_workers == 0:
            return
        if self._pool is None:
            self._pool, self._task = _start(self._prompts, self._read, self._num_workers)
        self._begun.extend((sample, self._pool.submit(self._task, sample)) for sample in samples)

    def take(self, sample: Sample) -> Outcome:
        """What reading the sample gives or raises: now if it is not the next of those that were begun."""
        if self._begun and self._begun[0][0] is sample:
            return self._begun.popleft()[1].result()
        return self._read(self._prompts, sample)

    def close(self) -> None:
        """End the threads, at most one sample later; what was begun and not taken is given up."""
        self._begun.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _start(
    prompts: PromptBuilder, read: Callable[[PromptBuilder, Sample], Outcome], num_threads: int
) -> tuple[ThreadPoolExecutor, Callable[[Sample], Outcome]]:
    """Threads, and how each of them reads. The processors are copied here, while no thread uses the original."""
    copies: queue.SimpleQueue[PromptBuilder] = queue.SimpleQueue()
    for _ in range(num_threads):
        copies.put(prompts.with_own_processor())
    own = threading.local()
    begun = threading.Barrier(num_threads + 1)

    def begin() -> None:
        own.prompts = copies.get()
        torch.set_num_threads(1)  # of this thread: several would keep the cores of the step busy with waiting
        begun.wait()

    pool = ThreadPoolExecutor(num_threads, "read", begin)
    threads = torch.get_num_threads()
    for _ in range(num_threads):
        pool.submit(int)  # makes a thread
    begun.wait()
    torch.set_num_threads(threads)  # of this one, and of any that is still to come
    return pool, lambda sample: read(own.prompts, sample)
