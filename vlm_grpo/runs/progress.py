"""The progress of a run on the terminal."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm


class Progress:
    """A bar on a terminal, elsewhere a line every few seconds: reward, headline metric, tokens/s and time left."""

    def __init__(
        self,
        total: int,
        headline: str,
        start: int = 0,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start` steps of `total` are done already (a resumed run). `clock` gives seconds."""
        self._total, self._headline, self._start, self._step = total, headline, start, start
        self._stream = sys.stderr if stream is None else stream
        self._every_s, self._clock = every_s, clock
        self._began = self._shown = self._last = clock()
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(total=total, initial=start, file=self._stream, unit="step", dynamic_ncols=True)

    def update(self, metrics: Mapping[str, float], num_tokens: int) -> None:
        """One more step is done; it generated and scored `num_tokens` tokens."""
        now = self._clock()
        rate = num_tokens / max(now - self._last, 1e-9)
        self._step, self._last = self._step + 1, now
        names = dict.fromkeys(("reward", self._headline))
        shown = {name.rpartition("/")[2]: f"{metrics[name]:.3f}" for name in names if name in metrics}
        shown["tokens/s"] = f"{rate:,.0f}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        elif now - self._shown >= self._every_s or self._step in (self._start + 1, self._total):
            self._shown = now
            left_s = (now - self._began) / (self._step - self._start) * (self._total - self._step)
            values = " · ".join(f"{name} {value}" for name, value in shown.items())
            line = f"step {self._step}/{self._total} · {values} · {tqdm.format_interval(left_s)} left"
            print(line, file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        tqdm.write(text, file=self._stream) if self._bar is not None else print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
