"""A grid of training runs that share all options but a few.

    accelerate launch -m vlm_grpo.experiment configs/experiments/branching.yaml
    accelerate launch -m vlm_grpo.experiment configs/experiments/branching.yaml only=[T4A1,T4A4] base.max_steps=100

Every variation is run once with every seed, each run in its own folder, output_dir/VARIATION-seed-N. The same command
goes on after an interruption: finished runs are skipped, one that was cut short is resumed from its newest checkpoint.
"""

import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_grpo.common.atomic import write_whole
from vlm_grpo.common.config import HELP_ARGUMENTS, layered_config, load_config, resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes, start_processes
from vlm_grpo.report import ReportConfig, write_report
from vlm_grpo.runs.folder import find_resume
from vlm_grpo.train import TrainConfig, check_run, train

# What a run is given by the experiment
GIVEN = ("output_dir", "seed", "resume_from_checkpoint")
FINISHED_FILE = "finished.json"
LOG_FILE = "log.txt"


@dataclass
class ExperimentConfig:
    """A grid of training runs."""

    # Folder of the runs, each in VARIATION-seed-N, and of the report on them
    output_dir: str = ""
    # A file of a training run's options that all runs begin from; none: the defaults
    base_config: str | None = None
    # Options of all runs, over those of base_config
    base: dict[str, Any] = field(default_factory=dict)
    # The options that make a variation, by the variation's name
    variations: dict[str, Any] = field(default_factory=dict)
    # Every variation is run once with each of these seeds
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    # Run these variations alone, in this order; none: all
    only: list[str] | None = None


@dataclass(frozen=True)
class PlannedRun:
    """One run of the grid."""

    name: str
    config: TrainConfig

    @property
    def folder(self) -> Path:
        """Its output folder."""
        return Path(str(self.config.output_dir))

    @property
    def is_finished(self) -> bool:
        """It has been run to its end."""
        return (self.folder / FINISHED_FILE).is_file()


def plan(config: ExperimentConfig, where: str = "in the experiment") -> list[PlannedRun]:
    """All runs, seed by seed, each of their options checked. Raises: UserError that names the variation."""
    if not config.output_dir:
        raise UserError(f"output_dir {where}: give the folder of the runs")
    if not config.variations:
        raise UserError(f"variations {where}: name at least one, as in variations.T4A4: {{num_answers: 4}}")
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"seeds={config.seeds} {where}: must be at least one number, each of them once")
    names = list(config.variations) if config.only is None else config.only
    if unknown := [name for name in names if name not in config.variations]:
        raise UserError(
            f"only={config.only}: there is no variation {unknown[0]!r}, only {', '.join(config.variations)}"
        )
    if not names or len(set(names)) < len(names):
        raise UserError(f"only={config.only}: must name at least one variation, each of them once")
    return [_planned(config, name, seed, where) for seed in config.seeds for name in names]


def _planned(config: ExperimentConfig, name: str, seed: int, where: str) -> PlannedRun:
    options = config.variations[name] or {}
    if not isinstance(options, Mapping):
        raise UserError(f"variations.{name} {where}: got {options!r}, but it takes a mapping of options")
    if not re.fullmatch(r"[\w.+=-]*\w[\w.+=-]*", name):
        raise UserError(f"variations.{name} {where}: the name is a folder's: letters, digits and . + = - _ alone")
    layers = [(config.base, f"{where}, base"), (options, f"{where}, variations.{name}")]
    for given, words in layers:
        if taken := [key for key in given if key in GIVEN]:
            raise UserError(f"option {taken[0]!r} {words}: the experiment itself gives it to every run")
    run = f"{name}-seed-{seed}"
    own = {"seed": seed, "output_dir": str(Path(config.output_dir) / run), "resume_from_checkpoint": True}
    planned = layered_config(TrainConfig, config.base_config, [*layers, (own, where)])
    try:
        check_run(planned)
    except UserError as error:
        raise UserError(f"variations.{name} {where}: {error}") from error
    return PlannedRun(run, planned)


def run_experiment(runs: Sequence[PlannedRun], processes: Processes) -> None:
    """Run what is not finished, one run after the other. Raises: UserError that names the run."""
    for run in runs:  # before the first begins: that of other options in one of the folders
        with _named(run):
            find_resume(run.folder, True, resolved_yaml(run.config))
    finished = [run.is_finished for run in runs]
    processes.wait()  # all have seen the same
    for number, (run, done) in enumerate(zip(runs, finished, strict=True), start=1):
        if processes.is_main:
            state = "is finished" if done else f"goes to {run.folder}"
            print(f"run {number} of {len(runs)}: {run.name} {state}", flush=True)
        if done:
            continue
        with _named(run), _logged(run, processes):
            train(run.config, processes)
        if processes.is_main:
            write_whole(run.folder / FINISHED_FILE, json.dumps({"max_steps": run.config.max_steps}).encode())
        gc.collect()  # the model and the optimiser of this run, before those of the next


@contextmanager
def _named(run: PlannedRun) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"run {run.name}: {error}") from error


@contextmanager
def _logged(run: PlannedRun, processes: Processes) -> Iterator[None]:
    """What the run prints goes to a file in its folder; progress stays on the terminal."""
    if not processes.is_main:
        yield
        return
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        log = open(run.folder / LOG_FILE, "a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UserError(f"cannot write {run.folder}: {error.strerror or error} (output_dir)") from error
    with log, redirect_stdout(log):
        yield


def main(argv: Sequence[str]) -> None:
    """Run the experiment of the file that is named first, and report on it."""
    named = [argument for argument in argv if "=" not in argument and argument not in HELP_ARGUMENTS]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)}: name one file; options are of the form key=value")
    path = [f"config={name}" for name in named]
    config = load_config(ExperimentConfig, [*path, *(argument for argument in argv if argument not in named)])
    runs = plan(config, f"in {named[0]}" if named else "on the command line")
    processes = start_processes()
    try:
        run_experiment(runs, processes)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with what is left", file=sys.stderr)
        raise SystemExit(130) from None
    if processes.is_main:
        print(f"written: {write_report([Path(config.output_dir)], ReportConfig())}")
    processes.wait()


if __name__ == "__main__":
    from vlm_grpo.common.program import run

    run(main)
