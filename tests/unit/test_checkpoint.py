"""Checkpoints are whole or absent whatever happens while they are written, and a run goes on exactly where it was."""

import json
import os
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vlm_grpo.common.config import resolved_yaml
from vlm_grpo.common.errors import UserError
from vlm_grpo.runs import checkpoint
from vlm_grpo.runs.checkpoint import (
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    save_checkpoint,
    save_model,
)
from vlm_grpo.runs.folder import begin_run, find_resume, held
from vlm_grpo.train import TrainConfig

CONFIG = "learning_rate: 0.1\noutput_dir: here\nresume_from_checkpoint: null\n"


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("{{ messages }}")


def save(output_dir: Path, step: int, limit: int | None = None, model: Callable[[Path], object] = write_model) -> Path:
    tensors = {"w/exp_avg": torch.full((3,), float(step))}
    return save_checkpoint(output_dir, step, model, tensors, {"seen": step * 8}, limit)


def assert_whole(folder: Path) -> None:
    step = int(folder.name.removeprefix("checkpoint-"))
    loaded = load_checkpoint(folder)
    assert (loaded.step, loaded.state["seen"]) == (step, step * 8)
    assert torch.equal(loaded.tensors["w/exp_avg"], torch.full((3,), float(step)))
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 100
    assert (folder / "templates" / "chat.jinja").read_text() == "{{ messages }}"


def test_saved_checkpoint_reads_back(tmp_path: Path) -> None:
    assert_whole(save(tmp_path, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def test_newest_is_by_number_and_only_complete_ones_count(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "checkpoint-100", tmp_path / "checkpoint-best")
    (tmp_path / "checkpoint-200").mkdir()  # as a partial copy leaves it
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert latest_checkpoint(tmp_path / "absent") is None
    assert_whole(save(tmp_path, 200))  # takes the place of the partial one


def test_limit_deletes_the_oldest_after_the_new_one_is_in_place(tmp_path: Path, monkeypatch) -> None:
    seen_at_deletion = []
    remove = checkpoint.remove_whole

    def watch(folder: Path) -> None:
        seen_at_deletion.append([path.name for path in checkpoints(tmp_path)])
        remove(folder)

    monkeypatch.setattr(checkpoint, "remove_whole", watch)
    for step in (1, 2, 3):
        save(tmp_path, step, limit=2)
    assert seen_at_deletion == [["checkpoint-1", "checkpoint-2", "checkpoint-3"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_existing_checkpoint_of_the_step_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 4)
    assert save(tmp_path, 4, model=lambda _: pytest.fail("written twice")) == tmp_path / "checkpoint-4"


def in_child(action: Callable[[], object]) -> int:
    """Run in a forked process; its wait status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child never uses them
        child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def killing_itself_at(call: int, monkeypatch) -> Callable[[], int]:
    """Count the system calls that make a save durable; SIGKILL the process just before the given one."""
    count = 0

    def wrap(function: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: count


def test_kill_at_any_point_of_a_save_leaves_whole_checkpoints(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        calls = killing_itself_at(-1, patched)
        for step in (1, 2):
            save(tmp_path / "counted", step, limit=2)
        before_last = calls()
        save(tmp_path / "counted", 3, limit=2)
        in_last = calls() - before_last
    assert in_last > 12, f"the third save made only {in_last} calls: the kill points are not seen"

    for point in range(1, in_last + 1):
        output_dir = tmp_path / f"killed-{point}"
        save(output_dir, 1)
        save(output_dir, 2)
        with monkeypatch.context() as patched:
            killing_itself_at(point, patched)
            status = in_child(lambda where=output_dir: save(where, 3, limit=2))
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        for folder in checkpoints(output_dir):
            assert_whole(folder)
        newest = latest_checkpoint(output_dir)
        assert newest is not None and newest.name in ("checkpoint-2", "checkpoint-3")

        begin_run(output_dir, CONFIG, 2)
        assert not [path.name for path in output_dir.iterdir() if path.name.startswith(".")]
        assert_whole(save(output_dir, 3, limit=2))


def test_kill_from_outside_while_saving_leaves_whole_checkpoints(tmp_path: Path) -> None:
    def save_for_ever() -> None:
        last = latest_checkpoint(tmp_path)
        step = load_checkpoint(last).step if last else 0
        while True:
            step += 1
            save(tmp_path, step, limit=2)

    for delay_s in (0.011, 0.047, 0.083, 0.131):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            save_for_ever()
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for folder in checkpoints(tmp_path):
            assert_whole(folder)
        begin_run(tmp_path, CONFIG, 0)
    assert checkpoints(tmp_path)


def assert_only_the_first_is_left(output_dir: Path) -> None:
    assert [path.name for path in output_dir.iterdir()] == ["checkpoint-1"]
    assert_whole(output_dir / "checkpoint-1")


def test_full_disk_is_a_clear_message_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def model_on_full_disk(folder: Path) -> None:
        (folder / "model.safetensors").symlink_to("/dev/full")
        (folder / "model.safetensors").write_bytes(b"weights")

    with pytest.raises(UserError, match=r"checkpoint-2: No space left.*resume_from_checkpoint=true"):
        save(tmp_path, 2, model=model_on_full_disk)
    assert_only_the_first_is_left(tmp_path)


@pytest.mark.parametrize("writer", ["model", "optimiser"])
def test_refusal_of_safetensors_own_writer_loses_nothing(tmp_path: Path, writer: str) -> None:
    from safetensors.torch import save_file

    save(tmp_path, 1)
    big = torch.zeros(1 << 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))  # a real refused write, needs no root
    try:
        with pytest.raises(UserError, match=rf"cannot write {tmp_path}/checkpoint-2"):
            if writer == "model":
                save(tmp_path, 2, model=lambda folder: save_file({"w": big}, folder / "model.safetensors"))
            else:
                save_checkpoint(tmp_path, 2, write_model, {"w/exp_avg": big}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_only_the_first_is_left(tmp_path)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failing_sync_or_rename_loses_nothing(tmp_path: Path, monkeypatch, name: str) -> None:
    save(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="No space left"):
        patched.setattr(os, name, refuse)
        save(tmp_path, 2)
    assert_only_the_first_is_left(tmp_path)


def test_error_of_the_model_writer_keeps_its_traceback(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, model=broken)
    assert not list(tmp_path.iterdir())


def test_final_model_lies_in_the_output_folder(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save_model(tmp_path, write_model)
    save_model(tmp_path, write_model)  # again, over the first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "model.safetensors", "templates"]
    assert (tmp_path / "templates" / "chat.jinja").exists()


def test_foreign_or_torn_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a whole checkpoint"):
        load_checkpoint(tmp_path)
    folder = save(tmp_path, 1)
    (folder / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="not a whole checkpoint"):
        load_checkpoint(folder)


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    assert find_resume(tmp_path / "new", None, CONFIG) is None
    begin_run(tmp_path, CONFIG, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"output_dir=.*holds another run.*resume_from_checkpoint=true"):
        find_resume(tmp_path, None, CONFIG)
    assert find_resume(tmp_path, True, CONFIG) is None  # killed before its first checkpoint: begins anew
    save(tmp_path, 5)
    assert find_resume(tmp_path, True, CONFIG) == tmp_path / "checkpoint-5"
    with pytest.raises(UserError, match=r"other options \(learning_rate was 0.1, is now 0.2\)"):
        find_resume(tmp_path, True, CONFIG.replace("0.1", "0.2"))
    elsewhere = CONFIG.replace("here", "there").replace("null", "true")
    assert find_resume(tmp_path, True, elsewhere) == tmp_path / "checkpoint-5"


def test_a_run_that_ended_before_its_first_step_is_begun_anew(tmp_path: Path) -> None:
    other = CONFIG.replace("0.1", "0.2")
    begin_run(tmp_path, CONFIG, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/acc": 0.5}\n')
    (tmp_path / "metrics_before.json").write_text("{}")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "log.txt").touch()
    for resume in (None, True):
        assert find_resume(tmp_path, resume, other) is None
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000001.parquet").touch()
    with pytest.raises(UserError, match="holds another run"):
        find_resume(tmp_path, None, other)


@pytest.mark.parametrize(
    "text",
    ["learning_rate: 0.1\n", f"# the one that worked\n{CONFIG}", CONFIG.replace("0.1", "1.0e-1"), "- a list\n"],
)
def test_options_that_somebody_wrote_are_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="holds another run"):
        find_resume(tmp_path, None, CONFIG)


def test_a_folder_in_which_another_process_works_is_refused(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        with (
            pytest.raises(UserError, match=r"output_dir=.*run: another run is at work there now"),
            held(tmp_path / "run"),
        ):
            pass
        with held(tmp_path / "other"):
            pass
    with held(tmp_path / "run"):
        pass


@pytest.mark.parametrize("resume", [None, True])
def test_a_folder_of_other_files_is_refused(tmp_path: Path, resume: bool | None) -> None:
    for name in (".keep", "slurm-1.out", "log.txt"):
        (tmp_path / name).touch()
    assert find_resume(tmp_path, resume, CONFIG) is None
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(UserError, match=r"output_dir=.* holds files that are no run's \(there is train.jsonl\)"):
        find_resume(tmp_path, resume, CONFIG)


def test_options_that_change_nothing_of_what_is_learnt_may_differ(tmp_path: Path) -> None:
    options = resolved_yaml(TrainConfig(output_dir="here"))
    begin_run(tmp_path, options, None)
    save(tmp_path, 5)
    free = {"on_bad_sample": "skip", "on_long_prompt": "skip", "eval_steps": 5, "save_steps": 5, "rollout_steps": 0}
    other = resolved_yaml(TrainConfig(output_dir="here", max_skipped_steps=3, **free))
    assert find_resume(tmp_path, True, other) == tmp_path / "checkpoint-5"


def test_a_run_of_constant_learning_rate_may_go_on_for_longer(tmp_path: Path) -> None:
    def options(**changes: Any) -> str:
        return resolved_yaml(TrainConfig(output_dir="here", **changes))

    begin_run(tmp_path, options(max_steps=5), None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n')
    with pytest.raises(UserError, match="to train its model further: model="):
        find_resume(tmp_path, True, options(max_steps=9))  # its records would be lost
    save(tmp_path, 5)
    assert find_resume(tmp_path, True, options(max_steps=9)) == tmp_path / "checkpoint-5"
    for changes in ({"max_steps": 4}, {"max_steps": 9, "seed": 1}, {"max_steps": 9, "lr_scheduler": "linear"}):
        with pytest.raises(UserError, match="with other options"):
            find_resume(tmp_path, True, options(**changes))


def test_folder_of_a_model_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="another run or model"):
        find_resume(tmp_path, None, CONFIG)
    with pytest.raises(
        UserError, match=r"holds another run or model \(there is model.safetensors\), without the config"
    ):
        find_resume(tmp_path, True, CONFIG)
    with pytest.raises(UserError, match="is a file"):
        find_resume(tmp_path / "model.safetensors", None, CONFIG)
    with pytest.raises(UserError, match="cannot write"):
        begin_run(tmp_path / "model.safetensors" / "below", CONFIG, None)


def test_resume_from_a_path(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begin_run(first, CONFIG, None)
    for step in (5, 10):
        save(first, step)
    newest = str(first / "checkpoint-10")
    assert find_resume(first, newest, CONFIG) == first / "checkpoint-10"
    with pytest.raises(UserError, match=r"has later ones \(checkpoint-10\)"):
        find_resume(first, str(first / "checkpoint-5"), CONFIG)
    with pytest.raises(UserError, match="no complete checkpoint; the newest complete one in output_dir is"):
        find_resume(first, str(first / "checkpoint-7"), CONFIG)

    config = CONFIG.replace("null", newest)
    assert find_resume(second, newest, config) == first / "checkpoint-10"
    begin_run(second, config, 10)
    assert find_resume(second, newest, config) == first / "checkpoint-10"  # killed before a checkpoint of its own
    with pytest.raises(UserError, match=f"began from resume_from_checkpoint={newest}"):
        find_resume(second, True, CONFIG)
    save(second, 15)
    assert find_resume(second, True, CONFIG) == second / "checkpoint-15"
    with pytest.raises(UserError, match="holds another run"):
        find_resume(second, newest, config)


def test_records_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    begin_run(tmp_path, CONFIG, None)
    rows = [{"step": step, "reward": step / 10} for step in (0, 1, 2, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 1, "rew')  # killed while writing
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3, 10):
        (tmp_path / "rollouts" / f"step-{step:06}.parquet").touch()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out").touch()
    begin_run(tmp_path, CONFIG, 2)
    assert [p.name for p in tmp_path.glob("tensorboard/*")] == ["events.out"], "TensorBoard purges its own"
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows[:4]
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step-000001.parquet", "step-000002.parquet"]
    begin_run(tmp_path, CONFIG, None)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "tensorboard").exists(), "its curves would be mixed with those of the new run"
    assert not list((tmp_path / "rollouts").iterdir())


def model_and_optimizer() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    decayed, plain = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_restored_optimiser_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = model_and_optimizer()
    train(*straight, range(7))

    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = optimizer_tensors(optimizer, model.named_parameters())
    assert set(tensors) == {f"{p}/{e}" for p, _ in model.named_parameters() for e in ("step", "exp_avg", "exp_avg_sq")}
    folder = save_checkpoint(tmp_path, 3, write_model, tensors, {})

    loaded = load_checkpoint(folder)
    model, optimizer = model_and_optimizer()
    model.load_state_dict(weights)
    load_optimizer(optimizer, model.named_parameters(), loaded.tensors)
    train(model, optimizer, range(3, 7))

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight[0].parameters(), strict=True))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_optimiser_state_of_another_model_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model.named_parameters())
    with pytest.raises(UserError, match=r"does not fit.*lora"):
        load_optimizer(optimizer, model.named_parameters(), {**tensors, "lora.A/exp_avg": torch.zeros(2)})
    with pytest.raises(UserError, match=r"does not fit.*0.weight"):
        load_optimizer(optimizer, model.named_parameters(), {**tensors, "0.weight/exp_avg": torch.zeros(2, 2)})
