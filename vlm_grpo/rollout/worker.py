"""Scores answers by a task's reward, in a process that a deadline ends where the task asks for one.

A reward that runs foreign code on what a model wrote (symbolic mathematics, a compiler) may never come back. A task
that sets `reward_timeout_s` is scored in a child process: at the deadline it is killed, the answer has the task's
`overdue_reward`, none where it names none, and the next answer gets a new child.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from vlm_grpo.common.errors import UserError
from vlm_grpo.task.check import score
from vlm_grpo.task.interface import Reward, Sample, TaskAdapter, describe, task_name

START_TIMEOUT_S = 120.0  # for a child to import what the task imports


class RewardWorker:
    """The reward of one task. Owns the child process, which lives no longer than its worker."""

    def __init__(self, adapter: TaskAdapter) -> None:
        limit_s = adapter.reward_timeout_s
        if limit_s is not None and not limit_s > 0:
            raise UserError(f"task {task_name(adapter)}: reward_timeout_s is {limit_s}; it must be above 0, or None")
        if adapter.reward_threads < 1:
            raise UserError(f"task {task_name(adapter)}: reward_threads is {adapter.reward_threads}; at least 1")
        self.adapter = adapter
        self.timeouts = 0  # answers that were given up at the deadline, so far
        self._child: _Child | None = None

    def score(self, sample: Sample, answer: str) -> Reward | None:
        """The answer's reward; None where the task has none, or has none for what it did not find in time.

        Raises: UserError, naming task and sample, where the reward raises, gives no reward or ends its process.
        """
        limit_s = self.adapter.reward_timeout_s
        if limit_s is None:
            return score(self.adapter, sample, answer)
        if self._child is None or not self._child.alive:
            self._child = _Child(self.adapter, limit_s)
        try:
            return self._child.score(sample, answer)
        except TimeoutError:
            self._child.end()
            self._child = None
            self.timeouts += 1
            return self.adapter.overdue_reward(sample)

    def score_all(self, answers: Sequence[tuple[Sample, str]]) -> list[Reward | None]:
        """The reward of each answer, several of them scored at a time where the task says that they may be."""
        threads = 1 if self.adapter.reward_timeout_s is not None else min(self.adapter.reward_threads, len(answers))
        if threads <= 1:
            return [self.score(sample, answer) for sample, answer in answers]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda given: self.score(*given), answers))


class _Child:
    """A process that scores one answer after the other."""

    def __init__(self, adapter: TaskAdapter, limit_s: float) -> None:
        self.task, self.limit_s = f"task {task_name(adapter)}", limit_s
        self._sample: Sample | None = None  # the one the child has
        self._connection, theirs = multiprocessing.Pipe()
        code = f"from vlm_grpo.rollout.worker import serve; serve({theirs.fileno()}, {limit_s})"
        # A plain interpreter, not multiprocessing's: that would import the whole trainer again for every child
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, self._process, self._connection)
        self._send(adapter)
        if not self._connection.poll(START_TIMEOUT_S):
            raise UserError(f"{self.task}: the process of reward_timeout_s did not start in {START_TIMEOUT_S:g} s")
        self._receive("its start")

    @property
    def alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def score(self, sample: Sample, answer: str) -> Reward | None:
        """The reward. Raises TimeoutError if it takes longer than the limit."""
        self._send((None if sample is self._sample else sample, answer))
        self._sample = sample
        if not self._connection.poll(self.limit_s):
            raise TimeoutError
        return self._receive(f"sample {sample.id!r}")

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            pass  # the child is gone, which _receive explains
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.task}: it sets reward_timeout_s, so itself and its samples go to another process, and that "
                f"fails: {error}"
            ) from error

    def _receive(self, doing: str) -> Reward | None:
        try:
            reward, error = self._connection.recv()
        except (EOFError, ConnectionError) as lost:
            status = self._process.wait()
            raise UserError(f"{self.task}, {doing}: the reward's process ended with status {status}") from lost
        if error is not None:
            raise UserError(error)
        return reward


def _end(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(handle: int, limit_s: float) -> None:
    """The child's life: score what comes until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    connection = Connection(handle)
    with open(os.devnull, "w") as nowhere:
        try:
            adapter = connection.recv()
            adapter.prepare_reward()
            connection.send((None, None))
            sample = None
            while True:
                given, answer = connection.recv()
                sample = sample if given is None else given
                assert isinstance(sample, Sample), f"the first message brings its sample, not {given!r}"
                # Ends a reward that hangs although its parent is no more there to do so
                faulthandler.dump_traceback_later(limit_s + 60, exit=True, file=nowhere)
                try:
                    answered = score(adapter, sample, answer), None
                except UserError as error:
                    answered = None, str(error)
                faulthandler.cancel_dump_traceback_later()
                connection.send(answered)
        except EOFError:
            return
        except Exception as error:  # what the task's own classes raise when they are read
            connection.send((None, f"reward_timeout_s: the task could not be read in its process: {describe(error)}"))
