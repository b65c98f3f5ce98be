"""Checkpoints that are either whole or not there, and resuming a run from the newest of them.

    output_dir/config.yaml           the resolved options of the run
    output_dir/metrics.jsonl         and rollouts/: see metrics.py
    output_dir/checkpoint-N/         the model as its own `save_pretrained` writes it, and
        optimizer.safetensors        tensors of the optimiser (and others to be restored), by name
        trainer_state.json           "step" and what else the trainer has to know

A checkpoint is written under a hidden name, synced to disk and renamed: after a kill or a full disk the name
checkpoint-N exists only if everything below it does. Nothing here is a pickle. What writes is for one process (rank 0).

A run may go on with another number of processes: prompts and their order stay, but each process draws from its own
random numbers, so the rollouts are others than the old number would have grown.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vlm_grpo.errors import UserError

CONFIG_FILE = "config.yaml"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"
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

# Errors that are the disk's, not ours: full, over quota, file too large, read-only, no permission, broken
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds beside the model."""

    folder: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    output_dir: Path,
    step: int,
    write_model: Callable[[Path], object],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    save_total_limit: int | None = None,
) -> Path:
    """Write `output_dir/checkpoint-{step}` and return it; then delete the oldest ones beyond `save_total_limit`.

    `write_model(folder)` writes model, processor and generation config. `state` must be plain JSON. Raises UserError if
    the disk refuses; earlier checkpoints are then untouched. A checkpoint of this step that exists is kept as it is.
    Write the step's metrics and rollouts before its checkpoint: a resumed run keeps those up to its checkpoint's step.
    """
    assert save_total_limit is None or save_total_limit >= 1, f"save_total_limit is {save_total_limit}, must be >= 1"
    final = output_dir / f"checkpoint-{step}"
    if is_complete(final):
        return final
    with writing_aside(final) as folder:
        write_model(folder)
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / OPTIMIZER_FILE)
        text = json.dumps({"step": step, **state}, indent=1, allow_nan=False)
        (folder / STATE_FILE).write_text(text + "\n", encoding="utf-8")
    if save_total_limit is not None:
        keep_newest(output_dir, save_total_limit)
    return final


def keep_newest(output_dir: Path, limit: int) -> None:
    """Delete the oldest checkpoints beyond `limit`. A run that goes on calls it too, after a kill between the two."""
    for old in checkpoints(output_dir)[:-limit]:
        _remove(old)


def save_model(output_dir: Path, write_model: Callable[[Path], object]) -> None:
    """Put the final model's files directly into `output_dir`, each of them whole or not there."""
    final = output_dir / "final-model"
    with writing_aside(final) as folder:
        write_model(folder)
    for path in sorted(final.iterdir()):
        target = output_dir / path.name
        if target.is_dir():
            _remove(target)
        os.replace(path, target)
    final.rmdir()
    _sync(output_dir)


def load_checkpoint(folder: Path) -> TrainingState:
    """What `save_checkpoint` wrote beside the model. Raises UserError if it is no whole checkpoint of ours."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        return TrainingState(folder, int(state["step"]), load_file(folder / OPTIMIZER_FILE), state)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"resume_from_checkpoint={folder}: not a whole checkpoint of this trainer ({error}); "
            "use one that is, or resume_from_checkpoint=true for the newest of output_dir"
        ) from error


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest step first."""
    if not output_dir.is_dir():
        return []
    return sorted((path for path in output_dir.iterdir() if is_complete(path)), key=_step_of)


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(reversed(checkpoints(output_dir)), None)


def is_complete(folder: Path) -> bool:
    """Whether this is a checkpoint-N folder in which nothing is missing (say, after a partial copy by hand)."""
    return bool(re.fullmatch(r"checkpoint-\d+", folder.name)) and (folder / STATE_FILE).is_file()


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
        later = [path.name for path in existing if _step_of(path) > _step_of(chosen)]
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
        raise _refusal(output_dir, error) from error
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
            if _is_aside(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_whole(output_dir / CONFIG_FILE, config_yaml.encode())
        rewind_records(output_dir, resumed_step)
    except OSError as error:
        raise _refusal(output_dir, error) from error


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


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The optimiser's state as `{parameter name}/{entry}`; parameters it has not stepped have none."""
    names = {parameter: name for name, parameter in named_parameters}
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for entry, value in optimizer.state.get(parameter, {}).items():
                assert isinstance(value, Tensor), f"optimiser entry {entry} is a {type(value).__name__}, not a tensor"
                tensors[f"{names[parameter]}/{entry}"] = value.detach()
    return tensors


def load_optimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave, bit for bit. Learning rates stay as they are: see `load_scheduler`."""
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        entries.setdefault(name, {})[entry] = value
    names = {parameter: name for name, parameter in named_parameters}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: entries.pop(names[p]) for index, p in enumerate(parameters) if names[p] in entries}
    wrong_shape = [names[parameters[i]] for i, e in state.items() if _moments_differ(e, parameters[i])]
    if entries or wrong_shape:
        raise UserError(
            "the checkpoint's optimiser state does not fit the trainable parameters "
            f"(first: {[*entries, *wrong_shape][0]}): resume with the model and LoRA options of the run that saved it"
        )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Step and current learning rates of a schedule, as plain JSON (which keeps floats bit for bit)."""
    return {"last_epoch": scheduler.last_epoch, "learning_rates": [float(lr) for lr in scheduler.get_last_lr()]}


def load_scheduler(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Put a newly made schedule and its optimiser's learning rates where `scheduler_state` saw them."""
    scheduler.last_epoch = state["last_epoch"]
    scheduler._step_count = state["last_epoch"] + 1
    scheduler._last_lr = list(state["learning_rates"])
    for group, learning_rate in zip(scheduler.optimizer.param_groups, state["learning_rates"], strict=True):
        group["lr"] = learning_rate


@contextmanager
def writing_aside(final: Path) -> Iterator[Path]:
    """A hidden folder beside `final` that is synced and renamed to it at the end, or removed if anything fails."""
    aside = final.with_name(f".{final.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _sync_tree(aside)
        if final.exists():  # incomplete, since complete ones are kept
            _remove(final)
        os.replace(aside, final)
        _sync(final.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        # safetensors and tokenizers write in Rust, where a full disk is an error of their own class
        refused = isinstance(error, OSError) and error.errno in _REFUSED
        if refused or any(f"(os error {number})" in str(error) for number in _REFUSED):
            raise _refusal(final, error) from error
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name holds the old content or all of the new one, whatever happens."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _refusal(path: Path, error: BaseException) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    parent = next(folder for folder in path.resolve().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free / 2**20
    return UserError(
        f"cannot write {path}: {reason} ({free:,.0f} MiB free there). What was saved before is untouched: "
        "free space or set output_dir or save_total_limit, then go on with resume_from_checkpoint=true"
    )


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
    # A run's own file has every option and no comment; one that somebody wrote is not ours to replace
    has_comments = re.search(rb"^\s*#", config.read_bytes(), re.MULTILINE)
    if has_comments or _saved_options(output_dir).keys() != yaml.safe_load(config_yaml).keys():
        return False
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    return not any(map(_tells_of_learning, lines)) and not any(output_dir.glob("rollouts/*"))


def _is_aside(path: Path) -> bool:
    """Whether this is the unfinished writing or deleting of something."""
    return path.name.startswith(".") and path.name.endswith((".writing", ".deleting"))


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


def _moments_differ(entries: Mapping[str, Tensor], parameter: Tensor) -> bool:
    return any(value.dim() > 0 and value.shape != parameter.shape for value in entries.values())


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _remove(folder: Path) -> None:
    """Delete a folder such that no half of it ever stands under its name."""
    aside = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
