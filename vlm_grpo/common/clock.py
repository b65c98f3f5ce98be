"""How long a step and its phases take."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Seconds of a step and of each of its phases."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase
    start: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase. On a GPU the time ends when all queued work is done."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add `seconds` of each phase that was timed elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Seconds: `time/{phase}` for each phase, and `step_time` from the start of the step until now."""
        total = time.perf_counter() - self.start
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()} | {"step_time": total}
