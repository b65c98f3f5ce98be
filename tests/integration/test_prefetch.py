"""Prompts that are read ahead of their step: the same prompts, errors and counts, each sample once, no thread left."""

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support import families
from support.forks import KILLED, Forks, forks

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import check_ranges
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.mixture import ComingSteps, Mixture
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model.load import ModelConfig, load_vlm
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.model.vlm import VLM
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter
from vlm_grpo.tree.types import Prompt

QUESTIONS = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
WAIT_S = 20.0  # for a thread to do what it has to, on any machine


class Shown(Sequence):
    """An image that loads when it is read, and says so."""

    def __init__(self, load: Callable[[], Image.Image]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise IndexError(index)
        return self.load()


def sample_of(key: str, images: Sequence, question: str) -> Sample:
    """A sample whose images are not looked at. In tests, shape checks look at the first one where a sample is made."""
    sample = Sample(key, [], question, None)
    object.__setattr__(sample, "images", images)
    return sample


class Task(TaskAdapter):
    """Samples made on access, with images that load on access; counts both. No pickle takes it, for it has a lambda."""

    def __init__(self, count: int = 12, folder: Path | None = None) -> None:
        self.count, self.folder = count, folder
        self.made: Counter[int] = Counter()
        self.shown: Counter[int] = Counter()
        self.threads: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.unpicklable = lambda: None

    def samples(self, split: str) -> LazySamples:
        return LazySamples([f"{split}-{i}" for i in range(self.count)], self._make)

    def _make(self, index: int) -> Sample:
        self.made[index] += 1
        assert threading.current_thread() is threading.main_thread(), "an adapter need not be safe among threads"
        if index == 7 and self.folder:
            images: Any = [self.folder / "missing.png"]
        else:
            images = [] if index % 4 == 3 else Shown(lambda: self._show(index))
        return sample_of(f"train-{index}", images, QUESTIONS[index % 3])

    def _show(self, index: int) -> Image.Image:
        assert self.hold.wait(WAIT_S)
        self.shown[index] += 1
        self.threads.add(threading.current_thread().name)
        return families.noise_images(1, index)[0].resize((60 + 9 * index, 50 + 5 * (index % 5)))

    def reward(self, sample: Sample, answer: str) -> Reward:
        return Reward(1.0)

    def reference_answer(self, sample: Sample) -> str:
        return ""


def assert_same(ours: Prompt, theirs: Prompt) -> None:
    assert (ours.sample.id, ours.text, ours.original_sizes) == (theirs.sample.id, theirs.text, theirs.original_sizes)
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.position_ids, theirs.position_ids)
    assert ours.pixels.keys() == theirs.pixels.keys()
    for name, value in ours.pixels.items():
        assert torch.equal(value, theirs.pixels[name]) and value.dtype == theirs.pixels[name].dtype


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return load_vlm(ModelConfig(), 1.0, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + WAIT_S
    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert alive() == []


def config(workers: int, **options: Any) -> DataConfig:
    return DataConfig(dataloader_num_workers=workers, **options)


def steps(vlm: VLM, task: Task, data: DataConfig, last: int = 5, per_step: int = 4, limit: int = 10_000):
    """Of each step, the prompts as a run reads them; afterwards what was left out."""
    with PromptReader(vlm.prompts, task, data, limit) as reader:
        coming = ComingSteps(Mixture({"": task.samples("train")}, None, 0), per_step, last, reader, Processes())
        read = [reader.read(list(coming.samples(number))) for number in range(1, last + 1)]
    return read, reader.skipped


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("family", families.IMAGE_FAMILIES)
def test_workers_read_the_same_prompts_in_the_same_order(family: str, workers: int) -> None:
    vlm = VLM(families.load_model(family, torch.float32), families.load_processor(family))
    plain, _ = steps(vlm, Task(), config(0))
    ahead, _ = steps(vlm, Task(), config(workers))
    assert [len(prompts) for prompts in ahead] == [4] * 5
    for ours, theirs in zip(ahead, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_each_sample_is_made_and_its_image_loaded_once_a_step_and_never_by_the_wrong_thread(
    tiny: VLM, workers: int
) -> None:
    task = Task(count=20)
    steps(tiny, task, config(workers))
    assert set(task.made.values()) == {1} and len(task.made) == 20
    assert set(task.shown.values()) == {1} and len(task.shown) == 15
    is_worker = [name.startswith("read") for name in task.threads]
    assert all(is_worker) if workers else not any(is_worker)
    assert len(task.threads) <= max(1, workers)


def test_the_next_step_is_read_while_this_one_is_worked_on(tiny: VLM) -> None:
    task = Task(count=20)
    with PromptReader(tiny.prompts, task, config(1), 10_000) as reader:
        coming = ComingSteps(Mixture({"": task.samples("train")}, None, 0), 4, 5, reader, Processes())
        reader.read(list(coming.samples(1)))
        end = time.monotonic() + WAIT_S
        expected = sum(i % 4 != 3 for i in task.made)  # of two steps
        while sum(task.shown.values()) < expected and time.monotonic() < end:
            time.sleep(0.01)
        assert sum(task.shown.values()) == expected and len(task.made) == 8


def test_each_thread_has_a_processor_of_its_own(tiny: VLM, monkeypatch) -> None:
    used: set[tuple[int, int]] = set()
    plain = PromptBuilder.build

    def watched(self: PromptBuilder, *args: Any) -> Prompt:
        used.add((threading.get_ident(), id(self.processor)))
        assert self.tokenizer is self.processor.tokenizer is not tiny.tokenizer
        time.sleep(0.02)  # long enough for every thread to take a sample
        return plain(self, *args)

    monkeypatch.setattr(PromptBuilder, "build", watched)
    steps(tiny, Task(count=20), config(3))
    threads, processors = zip(*used, strict=True)
    assert len(used) == len(set(threads)) == len(set(processors)) == 3
    assert id(tiny.processor) not in processors


def test_threads_leave_the_number_of_torchs_threads_as_it_was(tiny: VLM) -> None:
    before = torch.get_num_threads()
    steps(tiny, Task(), config(2))
    assert torch.get_num_threads() == before
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [before], "and of threads that come later"


# ---- what is wrong with a sample is said when it is its turn ----


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_bad_and_long_samples_are_left_out_and_counted_as_without_workers(
    tiny: VLM, tmp_path: Path, workers: int
) -> None:
    lengths = sorted(len(p.ids) for of_step in steps(tiny, Task(), config(0))[0] for p in of_step)
    limit = lengths[len(lengths) // 2]
    options = {"on_bad_sample": "skip", "on_long_prompt": "skip"}
    plain, expected = steps(tiny, Task(folder=tmp_path), config(0, **options), limit=limit)
    ahead, skipped = steps(tiny, Task(folder=tmp_path), config(workers, **options), limit=limit)
    assert expected.bad > 0 and expected.long > 0
    assert (skipped.bad, skipped.long, skipped.messages) == (expected.bad, expected.long, expected.messages)
    ids = [[prompt.sample.id for prompt in prompts] for prompts in ahead]
    assert ids == [[prompt.sample.id for prompt in prompts] for prompts in plain]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_ends_the_step_of_its_sample_and_no_other(tiny: VLM, tmp_path: Path, workers: int) -> None:
    task = Task(folder=tmp_path)
    mixture = Mixture({"": task.samples("train")}, None, 0)
    bad = next(n for n in range(1, 9) if any(sample.id == "train-7" for sample in mixture.step(n, 2)))
    with PromptReader(tiny.prompts, task, config(workers), 10_000) as reader:
        coming = ComingSteps(mixture, 2, 8, reader, Processes())
        for number in range(1, bad):
            assert len(reader.read(list(coming.samples(number)))) == 2
        assert bad > 1
        with pytest.raises(UserError, match=r"train-7.*missing\.png"):
            reader.read(list(coming.samples(bad)))
        assert reader.skipped.bad == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_crash_of_foreign_code_surfaces_in_its_own_step(tiny: VLM, workers: int) -> None:
    task = Task(count=4)

    def crash() -> Image.Image:
        raise ZeroDivisionError("in the loader")

    samples = [Sample("a", [], "Why?", None), sample_of("b", Shown(crash), "Why?")]
    with PromptReader(tiny.prompts, task, config(workers), 10_000) as reader:
        reader.expect(samples)
        assert reader.read(samples[:1])[0].sample.id == "a"
        with pytest.raises(ZeroDivisionError, match="in the loader"):
            reader.read(samples[1:])


def test_a_sample_that_was_not_expected_is_read_at_once(tiny: VLM) -> None:
    task = Task(count=20)
    samples = [task.samples("train")[i] for i in range(4)]
    with PromptReader(tiny.prompts, task, config(1), 10_000) as reader:
        reader.expect(samples[:2])
        assert reader.read(samples[3:])[0].sample is samples[3]
        assert [prompt.sample for prompt in reader.read(samples[:3])] == samples[:3]
    assert task.shown == Counter({0: 1, 1: 1, 2: 1})


def test_the_same_sample_may_be_expected_twice(tiny: VLM) -> None:
    task = Task()
    sample = task.samples("train")[0]
    with PromptReader(tiny.prompts, task, config(2), 10_000) as reader:
        reader.expect([sample, sample])
        first, second = reader.read([sample, sample])
    assert_same(first, second)


def test_batches_are_read_as_one_by_one(tiny: VLM) -> None:
    read = []
    for workers in (0, 2):
        task = Task()
        samples = task.samples("train")
        with PromptReader(tiny.prompts, task, config(workers), 10_000) as reader:
            batches = ([samples[i] for i in range(first, min(first + 5, 12))] for first in range(0, 12, 5))
            read.append(list(reader.read_batches(batches)))
        assert set(task.made.values()) == {1}
    assert [len(batch) for batch in read[0]] == [5, 5, 2]
    for ours, theirs in zip(read[1], read[0], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


# ---- the end ----


def test_closing_gives_up_what_was_not_begun(tiny: VLM) -> None:
    task = Task(count=60)
    task.hold.clear()
    reader = PromptReader(tiny.prompts, task, config(2), 10_000)
    reader.expect([task.samples("train")[i] for i in range(60)])
    assert len(alive()) == 2
    threading.Timer(0.2, task.hold.set).start()
    reader.close()
    assert alive() == [] and sum(task.shown.values()) <= 2
    reader.close()
    [again] = reader.read([task.samples("train")[1]])  # a closed reader still reads
    assert again.sample.id == "train-1"


def test_a_reader_that_nobody_closes_ends_its_threads_when_it_is_gone(tiny: VLM) -> None:
    task = Task()
    reader = PromptReader(tiny.prompts, task, config(2), 10_000)
    reader.expect([task.samples("train")[0]])
    assert alive()
    del reader  # the fixture waits for them


def test_a_number_of_workers_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataloader_num_workers=-1.*at least 0"):
        check_ranges(config(-1))


# ---- whole runs ----

OPTIONS = {
    **{"task": "refcoco", "task_args": "{data: scenes, limit: 7}", "max_steps": 3, "save_steps": 1, "eval_samples": 3},
    **{"prompts_per_step": 3, "num_thoughts": 2, "num_answers": 2, "max_thought_length": 6, "max_answer_length": 16},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("runs")) as server:
        yield server


def run(server: Forks, workers: int, processes: int = 1) -> Path:
    """The folder of a run of so many workers and processes, made once."""
    name = f"run-{workers}-{processes}"
    if not (server.folder / name).exists():
        options = OPTIONS | {"output_dir": name, "dataloader_num_workers": workers}
        assert server.run("train", name, options, processes) == [0] * processes, server.log(name)
    return server.folder / name


def assert_same_run(ours: Path, theirs: Path) -> None:
    for name in ("model.safetensors", "checkpoint-3/optimizer.safetensors", "metrics_before.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    for step in range(1, 4):
        name = f"rollouts/step-{step:06}.parquet"
        assert pq.read_table(ours / name).equals(pq.read_table(theirs / name)), name
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (ours, theirs)]
    rows = [[{k: v for k, v in json.loads(line).items() if "time" not in k} for line in of_run] for of_run in lines]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_workers_is_the_run_without_to_the_last_bit(server: Forks, processes: int) -> None:
    assert_same_run(run(server, 2, processes), run(server, 0, processes))


def test_a_killed_run_goes_on_with_any_number_of_workers(server: Forks) -> None:
    whole = run(server, workers=0)
    killed = OPTIONS | {"output_dir": "killed", "dataloader_num_workers": 3}
    assert server.run("train", "killed", killed, kill=("vlm_grpo.train:MetricsWriter.write", 3)) == [KILLED]
    assert (server.folder / "killed" / "checkpoint-1").exists()
    again = killed | {"resume_from_checkpoint": "true", "dataloader_num_workers": 2}
    assert server.run("train", "killed", again) == [0], server.log("killed")
    assert_same_run(server.folder / "killed", whole)


def test_a_run_whose_sample_is_bad_ends_with_its_message_and_does_not_hang(server: Forks) -> None:
    (server.folder / "bad_task.py").write_text(
        "from pathlib import Path\n"
        "from vlm_grpo.task import Reward, Sample, TaskAdapter\n"
        "class Bad(TaskAdapter):\n"
        "    def samples(self, split):\n"
        "        return [Sample(str(i), [Path('none.png')] if i else [], 'Why?', None) for i in range(9)]\n"
        "    def reward(self, sample, answer):\n"
        "        return Reward(0.0)\n"
        "    def reference_answer(self, sample):\n"
        "        return ''\n"
    )
    options = OPTIONS | {"task": "bad_task:Bad", "task_args": "{}", "eval_split": "", "output_dir": "bad"}
    assert server.run("train", "bad", options | {"dataloader_num_workers": 2}) == [2]
    assert "none.png" in server.log("bad").splitlines()[-1]
