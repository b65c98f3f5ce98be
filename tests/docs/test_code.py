"""The code of the README and the pages runs: it trains, scores, loads, and prints what stands below it."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from PIL import Image
from support.families import byte_level_tokenizer, save, text_sizes
from support.launch import Launch
from support.one_tree import blocks as printed_blocks
from support.pages import PAGES, ROOT, blocks, commands, fences, names, table

from vlm_grpo.common.config import load_config
from vlm_grpo.common.processes import Processes
from vlm_grpo.evaluation.jobs import EvaluateConfig
from vlm_grpo.model import families
from vlm_grpo.task import check_task, find_task, score
from vlm_grpo.tiny import TINY_PATH
from vlm_grpo.train import Run, TrainConfig
from vlm_grpo.train import main as train
from vlm_grpo.tree.pack import ancestors

TESTED = {
    "README.md": 1,
    "docs/runs.md": 1,
    "docs/writing_a_task.md": 1,
    "docs/adding_an_objective.md": 3,
    "docs/models.md": 1,
    "docs/scale.md": 1,
}
FEW = ["prompts_per_step=2", "num_thoughts=2", "num_answers=2", "eval_steps=1"]


def test_every_block_of_code_is_run_below() -> None:
    assert {page: count for page in PAGES if (count := len(blocks(page, "python")))} == TESTED
    languages = {named for page in PAGES for named, _ in fences(PAGES[page])}
    assert languages == {"", "bash", "python", "text"}


def run(source: str, page: str, scope: dict[str, Any] | None = None) -> dict[str, Any]:
    scope = {} if scope is None else scope
    exec(compile(source, page, "exec"), scope)
    return scope


def odd_lines(rows: list[Mapping[str, Any]]) -> str:
    """Rows as other programs may write them: with a byte order mark, raw separators in a text, and empty lines."""
    first, *others = (json.dumps(row, ensure_ascii=False) for row in rows)
    return "\ufeff" + "\n\n".join([first, *others]) + "\n \n"


@pytest.fixture
def cups(tmp_path: Path) -> Path:
    """A folder in which the README's task lies as my_task.py, beside its data."""
    [adapter] = blocks("README.md", "python")
    assert 20 <= len(adapter.splitlines()) <= 30, "a complete adapter in about 25 lines"
    (tmp_path / "my_task.py").write_text(adapter)
    (tmp_path / "cups").mkdir()
    for split in ("train", "val"):
        rows = [
            {"image": f"{split}{count}.png", "question": "How many\u2028cups\x85?", "answers": [str(count)]}
            for count in range(1, 5)
        ]
        (tmp_path / "cups" / f"{split}.jsonl").write_text(odd_lines(rows), encoding="utf-8")
        for row in rows:
            Image.new("RGB", (60, 40), (50 * int(row["answers"][0]), 90, 90)).save(tmp_path / "cups" / row["image"])
    return tmp_path


def test_the_adapter_in_the_readme_trains(cups: Path, launch: Launch) -> None:
    checks, trains = [command for command in commands("README.md") if "my_task:ShortAnswers" in " ".join(command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    checked = subprocess.run([sys.executable, *checks[1:]], cwd=cups, env=environment, capture_output=True, check=True)
    assert checked.stdout.startswith(b"task my_task:ShortAnswers: 4 samples of 'train'") and checked.stderr == b""

    printed, progress = launch(cups, trains, "max_steps=2", *FEW)
    said = [line for line in progress.splitlines() if "accelerate" not in line and "was set to a value" not in line]
    assert len(said) == 4
    assert all(re.match(r"step \d/2 · reward [\d.]+ · tokens/s |step \d · val reward ", line) for line in said), said
    assert "val, 4 samples, greedy:\nmetric" in printed

    folder = cups / "runs" / "my_task-ShortAnswers-tiny"
    for files, _ in table("docs/runs.md", "file"):
        for name in names(files):
            found = [*folder.glob(re.sub(r"N+", "*", name))]
            assert found or name.startswith(("adapter_", "config=")), f"{name} is not in {[*folder.iterdir()]}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {key for row in rows for key in row}
    for cell, _ in table("docs/runs.md", "metric"):
        for name in names(cell):
            assert name.format(part="words", metric="reward") in logged


def test_saved_models_load_as_the_page_says() -> None:
    [load] = blocks("docs/runs.md", "python")
    assert '"runs/refcoco-tiny"' in load, "the folder of the demonstration"
    scope = run(load.replace('"runs/refcoco-tiny"', repr(str(TINY_PATH))), "docs/runs.md")
    assert type(scope["model"]).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(scope["processor"]).__name__ == "Qwen2_5_VLProcessor"


# ---- writing a task ----


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's clicks.py and its data."""
    page = "docs/writing_a_task.md"
    [source] = blocks(page, "python")
    (tmp_path / "clicks.py").write_text(source)
    (tmp_path / "screens").mkdir()
    row = json.loads(re.search(r"`(\{\"id\".*?\})`", PAGES[page], re.DOTALL)[1])  # type: ignore[index]
    row["wish"] += "\u2028\x85"
    for split in ("train", "val"):
        rows = [row | {"id": f"{split}-{i}", "image": f"{i}.png", "button_xyxy": [8, 4, 16, 12 + i]} for i in range(4)]
        (tmp_path / "screens" / f"{split}.jsonl").write_text(odd_lines(rows), encoding="utf-8")
        for r in rows:
            Image.new("RGB", (56, 56), (90, 90, 90)).save(tmp_path / "screens" / r["image"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    return tmp_path


def test_the_task_of_the_page_passes_its_check_and_scores_as_it_says(here: Path) -> None:
    task = find_task("clicks:Clicks", {"folder": "screens", "reach": 10})
    check_task(task)
    samples = task.samples("val")  # button 8, 4, 16, 12
    assert [sample.id for sample in samples] == [f"val-{i}" for i in range(4)]
    for answer, value in (("[12, 8]", 1.0), ("(16, 18)", 0.4), ("[[20, 15], [12, 8]]", 0.5), ("nothing", 0.0)):
        reward = score(task, samples[0], answer)
        assert reward is not None and reward.value == pytest.approx(value)
        assert reward.parts["hit"] == (value == 1)


def test_the_commands_of_writing_a_task_run(here: Path) -> None:
    check, launches = blocks("docs/writing_a_task.md", "bash")
    command = shlex.split(check)
    subprocess.run([sys.executable, *command[1:]], check=True, env={"PYTHONPATH": str(ROOT)})
    to_train, to_evaluate = (shlex.split(line) for line in launches.splitlines())
    assert to_train[:4] == ["accelerate", "launch", "-m", "vlm_grpo.train"]
    train([*to_train[4:], "max_steps=1", *FEW])
    assert to_evaluate[:4] == ["accelerate", "launch", "-m", "vlm_grpo.evaluate"]
    config = load_config(EvaluateConfig, to_evaluate[4:])
    assert (here / config.model / "model.safetensors").is_file()
    assert load_config(TrainConfig, to_train[4:]).task == config.task


# ---- adding an objective, adding a family ----


def test_the_objective_of_the_page_is_added_and_tested(tmp_path: Path) -> None:
    """In a copy of the package that is changed as the page says."""
    function, annotation, test = blocks("docs/adding_an_objective.md", "python")
    shutil.copytree(ROOT / "vlm_grpo", tmp_path / "vlm_grpo", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "vlm_grpo" / "algorithm" / "objectives.py"
    source = file.read_text(encoding="utf-8")
    old = annotation.strip().replace(', "spo"', "")
    assert source.count(old) == 1, "the line of the package, with one name more"
    definitions = function.partition("per_sequence\n")[2]
    file.write_text(source.replace(old, annotation.strip()) + definitions, encoding="utf-8")
    accepted = "from vlm_grpo.common.config import load_config\nfrom vlm_grpo.train import TrainConfig\n"
    accepted += "assert load_config(TrainConfig, ['task=refcoco', 'loss_type=spo']).loss_type == 'spo'\n"
    calls = "\n".join(f"{name}()" for name in re.findall(r"^def (test_\w+)", test, re.MULTILINE))
    assert calls
    (tmp_path / "spo.py").write_text(f"{function}\n{test}\n{calls}\n{accepted}", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, "spo.py"], cwd=tmp_path, env=environment, check=True)


def test_the_family_of_the_page_equals_the_unpacked_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    run(blocks("docs/models.md", "python")[0], "docs/models.md")
    assert families.FAMILIES["olmo2"] == families.Family()

    tokenizer = byte_level_tokenizer(tf.Qwen2Tokenizer, "<|im_start|>", eos_token="<|im_end|>")
    config = tf.Olmo2Config(**text_sizes(tokenizer))
    (tmp_path / "model").mkdir()
    save(tmp_path / "model", tf.Olmo2ForCausalLM, config, tokenizer)
    row = json.dumps({"question": "Two and two?", "answer": "4"})
    (tmp_path / "train.jsonl").write_text(row + "\n")
    options = TrainConfig(
        task="jsonl",
        task_args={"data": str(tmp_path), "reward": "number"},
        model=str(tmp_path / "model"),
        num_thoughts=2,
        num_answers=2,
        max_thought_length=5,
        max_answer_length=4,
        prompts_per_step=1,
        eval_split="",
        beta=0.1,  # so that a tree without a right answer is scored too
        output_dir=str(tmp_path / "run"),
    )
    scored = []
    with Run(options, Processes()) as of_run:
        vlm, logprobs = of_run.vlm, of_run.vlm.logprobs

        def watched(pack: Any, features: Any) -> torch.Tensor:
            values = logprobs(pack, features)
            scored.append((pack, values.detach()))
            return values

        vlm.logprobs = watched  # type: ignore[method-assign]
        of_run.step(1)
        plain = tf.Olmo2ForCausalLM.from_pretrained(tmp_path / "model").eval()
        pack, packed = scored[0]
        torch.testing.assert_close(packed, _unpacked(plain, vlm.policy_logits, pack), atol=1e-5, rtol=0)


@torch.no_grad()
def _unpacked(model: Any, policy_logits: Callable[[torch.Tensor], torch.Tensor], pack: Any) -> torch.Tensor:
    """Of each scored token, log π by an ordinary forward of its branch alone, up to the token before it."""
    seen = ancestors(pack.parents)
    values = []
    for predictor, target in zip(pack.predictor.tolist(), pack.targets.tolist(), strict=True):
        on_branch = seen[pack.segment[predictor]][pack.segment] & (pack.path <= pack.path[predictor])
        logits = model(input_ids=pack.input_ids[on_branch][None], use_cache=False).logits[0, -1:]
        values.append(policy_logits(logits).log_softmax(-1)[0, target])
    return torch.stack(values)


# ---- code and what it prints ----


def test_the_sizes_of_the_page_are_computed_as_it_says() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(blocks("docs/scale.md", "python")[0], "docs/scale.md")
    assert out.getvalue() == blocks("docs/scale.md", "text")[0]


def test_the_tree_of_the_architecture_is_what_a_step_makes() -> None:
    """Word for word, and numbers to the last digit that stands there, which may round otherwise elsewhere."""
    number = r"-?\d+\.\d+"
    ours = list(printed_blocks().values())
    assert len(ours) == len(blocks("docs/architecture.md", "text"))
    for made, shown in zip(ours, blocks("docs/architecture.md", "text"), strict=True):
        assert re.sub(number, "#", made).split() == re.sub(number, "#", shown).split()
        found, expected = ([float(value) for value in re.findall(number, text)] for text in (made, shown))
        assert found == pytest.approx(expected, abs=2e-3)
