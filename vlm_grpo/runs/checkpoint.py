"""Checkpoints that are either whole or not there.

    output_dir/config.yaml           the resolved options of the run
    output_dir/metrics.jsonl         and rollouts/: see metrics.py
    output_dir/checkpoint-N/         the model as its own `save_pretrained` writes it, and
        optimizer.safetensors        tensors of the optimiser (and others to be restored), by name
        trainer_state.json           "step" and what else the trainer has to know

A checkpoint is written under a hidden name, synced to disk and renamed: after a kill or a full disk the name
checkpoint-N exists only if everything below it does. Nothing here is a pickle. What writes is for one process (rank 0).
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from vlm_grpo.common.atomic import remove_whole, sync, writing_aside
from vlm_grpo.common.errors import UserError

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer_state.json"


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
        remove_whole(old)


def save_model(output_dir: Path, write_model: Callable[[Path], object]) -> None:
    """Put the final model's files directly into `output_dir`, each of them whole or not there."""
    final = output_dir / "final-model"
    with writing_aside(final) as folder:
        write_model(folder)
    for path in sorted(final.iterdir()):
        target = output_dir / path.name
        if target.is_dir():
            remove_whole(target)
        os.replace(path, target)
    final.rmdir()
    sync(output_dir)


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
    return sorted((path for path in output_dir.iterdir() if is_complete(path)), key=step_of)


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(reversed(checkpoints(output_dir)), None)


def is_complete(folder: Path) -> bool:
    """Whether this is a checkpoint-N folder in which nothing is missing (say, after a partial copy by hand)."""
    return bool(re.fullmatch(r"checkpoint-\d+", folder.name)) and (folder / STATE_FILE).is_file()


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
    """Restore what `optimizer_tensors` gave, bit for bit. Learning rates stay as they are: every step sets its own."""
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


def _moments_differ(entries: Mapping[str, Tensor], parameter: Tensor) -> bool:
    return any(value.dim() > 0 and value.shape != parameter.shape for value in entries.values())


def step_of(folder: Path) -> int:
    """The N of checkpoint-N."""
    return int(folder.name.removeprefix("checkpoint-"))
