"""The page on writing a task holds: its example is checked, scores as it says, trains and is evaluated."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vlm_grpo.common.config import load_config
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.task import TaskAdapter, check_task, find_task, score
from vlm_grpo.train import TrainConfig
from vlm_grpo.train import main as train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing_a_task.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's clicks.py and its data."""
    (source,) = blocks("python")
    (tmp_path / "clicks.py").write_text(source)
    (tmp_path / "screens").mkdir()
    row = json.loads(re.search(r"`(\{\"id\".*?\})`", PAGE, re.DOTALL)[1])  # type: ignore[index]
    for split in ("train", "val"):
        rows = [row | {"id": f"{split}-{i}", "image": f"{i}.png", "button_xyxy": [8, 4, 16, 12 + i]} for i in range(4)]
        (tmp_path / "screens" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        for r in rows:
            Image.new("RGB", (56, 56), (90, 90, 90)).save(tmp_path / "screens" / r["image"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    return tmp_path


def test_the_example_passes_its_check_and_scores_as_it_says(here: Path) -> None:
    task = find_task("clicks:Clicks", {"folder": "screens", "reach": 10})
    check_task(task)
    sample = task.samples("val")[0]  # button 8, 4, 16, 12
    for answer, value in (("[12, 8]", 1.0), ("(16, 18)", 0.4), ("[[20, 15], [12, 8]]", 0.5), ("nothing", 0.0)):
        reward = score(task, sample, answer)
        assert reward is not None and reward.value == pytest.approx(value)
        assert reward.parts["hit"] == (value == 1)


def test_the_commands_of_the_page_run(here: Path) -> None:
    check, launches = blocks("bash")
    command = shlex.split(check)
    subprocess.run([sys.executable, *command[1:]], check=True, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    to_train, to_evaluate = (shlex.split(line) for line in launches.splitlines())
    assert to_train[:4] == ["accelerate", "launch", "-m", "vlm_grpo.train"]
    few = ["max_steps=1", "prompts_per_step=1", "num_thoughts=2", "num_answers=2", "eval_steps=1"]
    train([*to_train[4:], *few])
    assert to_evaluate[:4] == ["accelerate", "launch", "-m", "vlm_grpo.evaluate"]
    config = load_config(EvaluateConfig, to_evaluate[4:])
    assert (here / config.model / "model.safetensors").is_file()
    assert load_config(TrainConfig, to_train[4:]).task == config.task


def test_the_table_names_every_member_of_an_adapter() -> None:
    table = PAGE.partition("## What each part means")[2].partition("##")[0]
    named = set(re.findall(r"`(\w+)", table))
    members = {name for name in vars(TaskAdapter) if not name.startswith("_")} - {"demo_args", "full_marks"}
    assert members <= named
