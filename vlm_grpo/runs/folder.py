"""The folder of a run: whether one may begin or go on there, from which checkpoint, and which records stay.

A run may go on with another number of processes: prompts and their order stay, but each process draws from its own
random numbers, so the rollouts are others than the old number would have grown.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from vlm_grpo.common.atomic import is_aside, refusal, write_whole
from vlm_grpo.common.errors import UserError
from vlm_grpo.runs.checkpoint import checkpoints, is_complete, latest_checkpoint, step_of

CONFIG_FILE = "config.yaml"
# What in a folder shows that a run, or a model that ours would overwrite, lives there
RUN_FILES = (CONFIG_FILE, "metrics.jsonl", "rollouts", "config.json", "adapter_config.json", "model.safetensors")

# What a run leaves before its first step is finished
BEGUN_FILES = frozenset({CONFIG_FILE, "metrics.jsonl", "metrics_before.json", "tensorboard", "rollouts"})

# Options that may differ between a run and its continuation: they say where and how it is kept and looked at, and what
# stops it, not what it computes
FREE_OPTIONS = frozenset(
    {"output_dir", "resume_from_checkpoint", "dataloader_num_workers"}
    | {"save_steps", "save_total_limit", "rollout_steps", "eval_steps", "diagnostics_every", "diagnostics_layers"}
    | {"on_bad_sample", "on_long_prompt", "max_skipped_steps"}
)


def check_unused(output_dir: Path, config_yaml: str, way_on: str = "") -> None:
    """Raise UserError, which says the `way_on`, if a run or a model lives in the folder that a new run would spoil."""
    _check_folder(output_dir)
    found = _signs_of_a_run(output_dir)
    if found and not _has_only_begun(output_dir, config_yaml):
        raise UserError(
            f"output_dir={output_dir} holds another run or model (there is {', '.join(found)}): "
            f"set {way_on}another output_dir"
        )


def find_resume(
    output_dir: Path,
    resume: bool | str | None,
    config_yaml: str,
    free_options: Collection[str] = FREE_OPTIONS,
) -> Path | None:
    """The checkpoint to go on from, None to begin. Only reads: every process may ask before rank 0 calls `begin_run`.

    A run of which neither a checkpoint nor a finished step was saved is no more than its options: whatever comes next
    begins anew in its folder.

    resume=None|False: begin. UserError if output_dir holds a run, since going on in it would mix two.
    resume=True: the newest checkpoint of output_dir, or begin if none was completed; so a job that is restarted again
    and again can always say so. UserError if the run there had other options (other than `free_options`).
    resume=PATH: that checkpoint. In output_dir only the newest will do: later ones would be those of another run.
    """
    if not resume:
        check_unused(output_dir, config_yaml, "resume_from_checkpoint=true to go on with it, or ")
        return None
    _check_folder(output_dir)
    existing = checkpoints(output_dir)
    newest = existing[-1] if existing else None
    is_new = _has_only_begun(output_dir, config_yaml)
    found = [] if is_new else _signs_of_a_run(output_dir)
    saved = _saved_options(output_dir)
    origin = saved.get("resume_from_checkpoint")  # of another folder, if this run began from one
    if resume is True:
        if found and not saved and newest is None:
            raise UserError(
                f"output_dir={output_dir} holds another run or model (there is {', '.join(found)}), without the "
                f"{CONFIG_FILE} by which a run goes on: set another output_dir"
            )
        if not is_new:
            _check_same_options(output_dir, saved, config_yaml, free_options)
        if newest is None and isinstance(origin, str):
            raise UserError(
                f"resume_from_checkpoint=true: output_dir={output_dir} has no complete checkpoint of its own yet; "
                f"its run began from resume_from_checkpoint={origin}, say so again"
            )
        return newest
    chosen = Path(resume)
    if not is_complete(chosen):
        near = f"; the newest complete one in output_dir is {newest}" if newest else ""
        raise UserError(f"resume_from_checkpoint={resume}: there is no complete checkpoint{near}")
    if newest and chosen.resolve().parent == output_dir.resolve():
        later = [path.name for path in existing if step_of(path) > step_of(chosen)]
        if later:
            raise UserError(
                f"resume_from_checkpoint={resume}: output_dir={output_dir} has later ones ({', '.join(later)}); "
                "set another output_dir, or move those away"
            )
        _check_same_options(output_dir, saved, config_yaml, free_options)
    elif newest or (found and origin != resume):
        raise UserError(
            f"output_dir={output_dir} holds another run than resume_from_checkpoint={resume} "
            f"(there is {', '.join(found)}): set another output_dir"
        )
    return chosen


@contextmanager
def held(output_dir: Path) -> Iterator[None]:
    """Inside, no other process on this machine works in the folder (rank 0). Raises: UserError where one does."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(output_dir, os.O_RDONLY)
    except OSError as error:
        raise refusal(output_dir, error) from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(
            f"output_dir={output_dir}: another run is at work there now: set another output_dir, or wait for its end"
        ) from None
    except OSError as error:  # a file system without locks has no such guard
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            os.close(folder)
            raise
    try:
        yield
    finally:
        os.close(folder)


def begin_run(output_dir: Path, config_yaml: str, resumed_step: int | None) -> None:
    """Prepare the folder (rank 0): sweep up what a killed save left, save the options, drop records of later steps.

    `resumed_step` is the step of the checkpoint that the run goes on from; with None all records are dropped, for
    the run begins anew (find_resume has seen to it that they are this run's own).
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for path in output_dir.iterdir():
            if is_aside(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_whole(output_dir / CONFIG_FILE, config_yaml.encode())
        rewind_records(output_dir, resumed_step)
    except OSError as error:
        raise refusal(output_dir, error) from error


def rewind_records(output_dir: Path, step: int | None) -> None:
    """Drop metrics and rollouts of steps after `step` (all for None), so that a resumed run repeats none.

    A last line of the metrics that a kill left unfinished goes too. TensorBoard's own writer purges its later steps,
    but not those of a run that begins anew.
    """
    metrics = output_dir / "metrics.jsonl"
    if metrics.exists():
        if step is None:
            shutil.rmtree(output_dir / "tensorboard", ignore_errors=True)
        lines = metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if step is not None and _row_step(line) <= step]
        if kept != lines:
            write_whole(metrics, b"".join(kept))
    for path in output_dir.glob("rollouts/step-*.parquet"):
        if step is None or int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _check_folder(output_dir: Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"output_dir={output_dir} is a file, but must be a folder or not exist")
    others = [path.name for path in output_dir.iterdir() if not _is_beside(path)] if output_dir.exists() else []
    if others and not _signs_of_a_run(output_dir):
        raise UserError(
            f"output_dir={output_dir} holds files that are no run's (there is {min(others)}): set another output_dir, "
            "which is empty or does not exist"
        )


def _signs_of_a_run(output_dir: Path) -> list[str]:
    newest = latest_checkpoint(output_dir)
    return ([newest.name] if newest else []) + [name for name in RUN_FILES if (output_dir / name).exists()]


def _has_only_begun(output_dir: Path, config_yaml: str) -> bool:
    """Whether nothing lies in the folder but the options of a run like this one, and what precedes its first step."""
    config, metrics = output_dir / CONFIG_FILE, output_dir / "metrics.jsonl"
    if not config.is_file() or not {path.name for path in output_dir.iterdir() if not _is_beside(path)} <= BEGUN_FILES:
        return False
    # A run's own file has every option, as a run writes them; one that somebody wrote is not ours to replace
    options = _saved_options(output_dir)
    if options.keys() != yaml.safe_load(config_yaml).keys() or _yaml_of(options) != config.read_bytes():
        return False
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    return not any(map(_tells_of_learning, lines)) and not any(output_dir.glob("rollouts/*"))


def _is_beside(path: Path) -> bool:
    """Whether this says nothing about a folder: it is hidden, or what somebody wrote down of a program's output."""
    return path.name.startswith(".") or path.name == "log.txt" or path.suffix in (".log", ".out", ".err")


def _saved_options(output_dir: Path) -> dict[str, Any]:
    """The options of the run that lives there; none where the file is no run's."""
    try:
        options = yaml.safe_load((output_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return options if isinstance(options, dict) else {}


def _yaml_of(options: Mapping[str, Any]) -> bytes:
    """The options as a run writes them; see `resolved_yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(options))).encode()


def _check_same_options(
    output_dir: Path, saved: Mapping[str, Any], config_yaml: str, free_options: Collection[str]
) -> None:
    given = yaml.safe_load(config_yaml) or {}
    differ = [k for k in sorted({*saved, *given} - set(free_options)) if saved.get(k) != given.get(k)]
    is_longer = "max_steps" in differ and given["max_steps"] > saved.get("max_steps", given["max_steps"])
    # A constant learning rate does not know where the run ends, so that its steps are those of the longer run
    if is_longer and checkpoints(output_dir) and given.get("lr_scheduler") == "constant":
        differ.remove("max_steps")
    if saved and differ:
        said = "; ".join(f"{k} was {saved.get(k)!r}, is now {given.get(k)!r}" for k in differ)
        longer = f"; to train its model further: model={output_dir} and another output_dir" if is_longer else ""
        raise UserError(
            f"output_dir={output_dir} holds a run with other options ({said}): "
            f"resume_from_checkpoint needs the same ones, or set another output_dir{longer}"
        )


def _row_step(line: bytes) -> float:
    """The step of a line of metrics; infinite for a line that was not finished."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _tells_of_learning(line: bytes) -> bool:
    """Whether a line of metrics is of a step that saw a sample; of one that was not finished, it may be."""
    return _row_step(line) > 0 and (_row_step(line) == float("inf") or json.loads(line).get("num_prompts") != 0)
