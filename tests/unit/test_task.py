"""Finding, building and checking adapters, and validating what their rewards give."""

import math
import textwrap
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.common.errors import UserError
from vlm_grpo.data.tasks import split_samples
from vlm_grpo.task import (
    LazySamples,
    Reward,
    Sample,
    TaskAdapter,
    check_samples,
    check_task,
    find_task,
    known_tasks,
    score,
)
from vlm_grpo.task.check import JUNK_ANSWERS

ADAPTER = """
    from vlm_grpo.task import Reward, Sample, TaskAdapter

    class {name}(TaskAdapter):
        def __init__(self, size: int, mode: str = "plain"):
            self.size = size

        def samples(self, split):
            return [Sample(str(i), [], "?", "yes") for i in range(self.size)]

        def reward(self, sample, answer):
            return Reward(float(answer == "yes"))

        def reference_answer(self, sample):
            return "yes"
"""


class Sums(TaskAdapter):
    """Sums of two numbers; `gives` replaces what reward() returns."""

    def __init__(self, gives=None):
        self.gives = gives

    def samples(self, split):
        return [Sample(f"{a}+1", [], f"{a} + 1 = ?", a + 1) for a in range(3)]

    def reward(self, sample, answer):
        if self.gives is not None:
            return self.gives(answer)
        return Reward(float(answer == str(sample.target)), {"short": float(len(answer) < 3)})

    def reference_answer(self, sample):
        return str(sample.target)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory; modules are written with write(name, source)."""
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def user_error(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_a_task_of_the_package_is_found_by_its_file_name():
    assert "refcoco" in known_tasks()
    assert type(find_task("refcoco", {"data": "scenes"})).__name__ == "RefCOCO"


def test_a_class_in_the_current_directory_is_found(here):
    here("my_module", ADAPTER.format(name="MyTask"))
    task = find_task("my_module:MyTask", {"size": 4})
    check_task(task)
    assert len(task.samples("train")) == 4


def test_a_misspelt_task_lists_the_known_ones_and_where_they_were_looked_for():
    message = user_error(lambda: find_task("refcoko", {}))
    assert "Did you mean 'refcoco'?" in message
    assert "Known tasks: " in message and "tasks" in message
    assert "task=my_module:MyTask" in message


def test_a_missing_module_says_where_it_was_looked_for(here, tmp_path):
    message = user_error(lambda: find_task("nowhere_to_be_found:Task", {}))
    assert "'nowhere_to_be_found'" in message and str(tmp_path) in message and "refcoco" in message
    assert "'my_missing'" in user_error(lambda: find_task("my_missing.chess:Chess", {}))


def test_a_missing_class_lists_the_adapters_of_the_module(here):
    here("my_other_module", ADAPTER.format(name="MyTask"))
    message = user_error(lambda: find_task("my_other_module:Mytask", {"size": 1}))
    assert "'Mytask'" in message and "MyTask" in message
    assert "my_other_module.py" in message


def test_a_module_that_fails_to_import_is_named_with_its_line(here):
    here("my_broken_module", "x = 1\nraise ValueError('bad day')\n")
    message = user_error(lambda: find_task("my_broken_module:Task", {}))
    assert "ValueError: bad day" in message and "my_broken_module.py:2" in message
    here("my_needy_module", "import not_installed_anywhere\n")
    here("my_unfinished_module", "x = 1\ndef f(:\n")
    message = user_error(lambda: find_task("my_unfinished_module:Task", {}))
    assert "SyntaxError" in message and "my_unfinished_module.py:2" in message and "importlib" not in message
    assert "it needs not_installed_anywhere" in user_error(lambda: find_task("my_needy_module:Task", {}))


def test_two_adapters_in_one_task_file_are_refused(here, tmp_path, monkeypatch):
    import tasks

    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    here("twins", ADAPTER.format(name="One") + ADAPTER.format(name="Two"))
    here("nothing", "x = 1\n")
    here("single", "from tasks.twins import One\n" + textwrap.dedent(ADAPTER.format(name="Three")))
    assert "defines One, Two" in user_error(lambda: find_task("twins", {"size": 1}))
    assert "defines none" in user_error(lambda: find_task("nothing", {}))
    assert type(find_task("single", {"size": 1})).__name__ == "Three"  # an imported adapter is not the module's own


def test_an_abstract_adapter_names_what_it_lacks(here):
    here("my_half", "from vlm_grpo.task import TaskAdapter\nclass Half(TaskAdapter):\n    samples = None\n")
    assert "reference_answer, reward" in user_error(lambda: find_task("my_half:Half", {}))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 1, "moed": "x"}, "unknown argument task_args.moed. Did you mean 'mode'? Accepted: size, mode."),
        ({}, "missing a required argument: 'size'"),
        ({"size": "many"}, "task=my_args:MyTask: task_args.size is 'many'; accepted: a whole number."),
        ({"size": True}, "task_args.size is True; accepted: a whole number."),
        ({"size": 1, "mode": 5}, "task_args.mode is 5; accepted: text."),
        ({"size": 1, "mode": ["x"]}, "task_args.mode is ['x']; accepted: text."),
    ],
)
def test_wrong_constructor_arguments_are_named(here, args, message):
    here("my_args", ADAPTER.format(name="MyTask"))
    assert message in user_error(lambda: find_task("my_args:MyTask", args))


def test_a_constructor_that_raises_is_named(here):
    source = textwrap.dedent(ADAPTER.format(name="MyTask")).replace("self.size = size", "self.size = 1 / size")
    here("my_crash", source)
    message = user_error(lambda: find_task("my_crash:MyTask", {"size": 0}))
    assert "ZeroDivisionError" in message and "my_crash.py:" in message


SAMPLE = Sample("s7", [], "?", None)


def unchecked(value, parts):
    """A Reward past the type checks of the tests: a user's code runs without them."""
    made = object.__new__(Reward)
    object.__setattr__(made, "value", value)
    object.__setattr__(made, "parts", parts)
    return made


def test_a_reward_is_passed_on_with_plain_floats():
    made = unchecked(np.float32(0.5), {"hits": np.int64(3)})
    reward = score(Sums(lambda answer: made), SAMPLE, "a")
    assert reward == Reward(0.5, {"hits": 3.0})
    assert type(reward.value) is float and type(reward.parts["hits"]) is float


@pytest.mark.parametrize("gives", [None, Reward(math.nan), Reward(math.inf), Reward(np.float64("nan"))])
def test_no_reward_and_nan_are_none(gives):
    assert score(Sums(lambda answer: gives), SAMPLE, "a") is None


@pytest.mark.parametrize("gives", ["1.0", True, 1.0, (1.0, {}), {"value": 1}])
def test_what_is_no_reward_is_an_error_naming_task_and_sample(gives):
    message = user_error(lambda: score(Sums(lambda answer: gives), SAMPLE, "a"))
    assert "Sums" in message and "'s7'" in message and repr(gives) in message


@pytest.mark.parametrize(
    ("value", "parts"), [("1", {}), (True, {}), (1.0, {"a": "x"}), (1.0, {"a": None}), (Decimal(1), {})]
)
def test_a_reward_that_holds_no_number_is_an_error(value, parts):
    made = unchecked(value, parts)
    message = user_error(lambda: score(Sums(lambda answer: made), SAMPLE, "a"))
    assert "'s7'" in message and "must be a number" in message


def test_a_reward_that_raises_is_an_error_with_its_place():
    def crash(answer):
        return int(answer)

    message = user_error(lambda: score(Sums(crash), SAMPLE, "no number"))
    assert "Sums" in message and "'s7'" in message and "ValueError" in message
    assert "test_task.py:" in message and "'no number'" in message


def test_the_place_of_an_error_is_in_the_task_s_own_file(here):
    source = textwrap.dedent(ADAPTER.format(name="MyTask"))
    here("my_reader", "import json\n" + source.replace("return [Sample", "return json.loads('[1, ') or [Sample"))
    line = 1 + source.splitlines().index(next(x for x in source.splitlines() if "return [Sample" in x)) + 1
    task = find_task("my_reader:MyTask", {"size": 1})
    message = user_error(lambda: split_samples(task, "train", None))
    assert "JSONDecodeError" in message and f"my_reader.py:{line}" in message and "decoder.py" not in message


def test_an_error_for_the_user_keeps_its_words_and_names_the_sample():
    def refuse(answer):
        raise UserError("the judge is not there")

    message = user_error(lambda: score(Sums(refuse), SAMPLE, "a"))
    assert "'s7'" in message and message.endswith("the judge is not there")


def test_empty_splits_and_equal_ids_are_named():
    assert "'val' is empty" in user_error(lambda: check_samples([], "val"))
    twice = [Sample("a", [], "?", 1), Sample("b", [], "?", 1), Sample("a", [], "?", 1)]
    assert "the id 'a' stands at items 0 and 2" in user_error(lambda: check_samples(twice, "val"))
    check_samples(twice[:2], "val")


def test_lazy_samples_are_made_only_on_access():
    made = []

    def make(index):
        made.append(index)
        return Sample(str(index), [], "?", index)

    samples = LazySamples([str(index) for index in range(5)], make)
    check_samples(samples, "train")
    assert made == []
    assert samples[-1].target == 4 and made == [4]
    assert [one.target for one in samples[1:4:2]] == [1, 3]
    assert samples.take([3, 0])[0].id == "3" == samples.take([3, 0]).ids[0]
    with pytest.raises(IndexError):
        samples[5]
    assert "stands at items 0 and 1" in user_error(lambda: check_samples(LazySamples(["x", "x"], make), "train"))


@pytest.mark.parametrize("error", [IndexError, StopIteration, KeyError])
def test_a_sample_that_cannot_be_made_is_named_and_ends_no_loop_in_silence(error):
    def make(index):
        if index == 1:
            raise error("box")
        return Sample(str(index), [], "?", index)

    samples = LazySamples(["a", "b", "c"], make)
    for loop in (lambda: list(samples), lambda: list(samples[1:]), lambda: samples.take([2, 1])[1]):
        message = user_error(loop)
        assert message.startswith(f"sample 'b' cannot be made: {error.__name__}: ") and "test_task.py:" in message
    assert samples[2].target == 2


def test_the_first_so_many_samples_are_made_on_access_too():
    made = []

    def make(index):
        made.append(index)
        return Sample(str(index), [], "?", index)

    class Lazy(Sums):
        def samples(self, split):
            return LazySamples(["0", "1", "2"], make)

    first = split_samples(Lazy(), "train", limit=2)
    assert len(first) == 2 and made == []
    assert [one.target for one in first] == [0, 1] == made


def test_a_good_task_passes_the_check_with_a_line(capsys):
    check_task(Sums())
    [line] = capsys.readouterr().out.splitlines()
    assert "Sums: 3 samples of 'train'" in line


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_by_the_check(value):
    task = Sums()
    task.gives = lambda answer: Reward(1.0 if answer.strip() in ("1", "2", "3") else value)
    message = user_error(lambda: check_task(task))
    assert "'0+1'" in message and "no finite number" in message
    task.gives = lambda answer: Reward(1.0) if answer.strip() in ("1", "2", "3") else None
    check_task(task)


@pytest.mark.parametrize("images", ["picture.png", None, 7])
def test_images_that_are_no_list_are_named_by_the_check(images):
    sample = Sample("a", [], "?", 1)
    vars(sample)["images"] = images  # past the shape checks that only the tests run
    task = Sums()
    task.samples = lambda split: [sample]
    message = user_error(lambda: check_task(task))
    assert "'a': images is" in message and "must be a list" in message


def test_default_metrics_are_means_of_reward_and_parts():
    rewards = [Reward(1.0, {"a": 1.0}), Reward(0.5, {"a": 0.0, "b": 4.0})]
    samples = [SAMPLE, SAMPLE]
    assert Sums().metrics(samples, ["", ""], rewards) == {"reward": 0.75, "a": 0.5, "b": 4.0}
    shadowed = [Reward(1.0, {"reward": 9.0}), Reward(0.5, {"reward": 9.0})]
    assert Sums().metrics(samples, ["", ""], shadowed) == {"reward": 0.75}


def test_the_headline_is_also_the_mean_of_every_group():
    class Grouped(Sums):
        headline = "a"

        def groups(self, sample):
            return sample.target

    rewards = [Reward(1.0, {"a": 1.0}), Reward(0.5, {"a": 0.0, "b": 4.0}), Reward(0.0, {"a": 0.5}), Reward(0.3)]
    samples = [Sample(str(i), [], "?", groups) for i, groups in enumerate((["y", "x/1"], ["y"], [], ["y"]))]
    task = Grouped()
    metrics = task.metrics(samples, [""] * 4, rewards)
    assert metrics == {"reward": 0.45, "a": 0.5, "b": 4.0, "a/x/1": 1.0, "a/y": 0.5}
    assert list(metrics)[3:] == ["a/x/1", "a/y"]
    Grouped.headline = "reward"
    assert task.metrics(samples, [""] * 4, rewards)["reward/y"] == pytest.approx((1.0 + 0.5 + 0.3) / 3)
    Grouped.headline = "absent"
    assert set(task.metrics(samples, [""] * 4, rewards)) == {"reward", "a", "b"}


def test_a_gold_answer_below_full_marks_is_refused():
    message = user_error(lambda: check_task(Sums(lambda answer: Reward(0.5))))
    assert "'0+1'" in message and "'1'" in message and "scores 0.5 where full marks are 1" in message


def test_a_generous_reward_is_refused():
    assert "the junk answer" in user_error(lambda: check_task(Sums(lambda answer: Reward(1.0))))


def test_a_reward_that_raises_on_junk_is_refused():
    assert "reward() raised ValueError" in user_error(lambda: check_task(Sums(lambda answer: Reward(float(answer)))))


def test_junk_covers_empty_unfinished_and_not_a_number():
    assert "" in JUNK_ANSWERS
    assert any("nan" in junk for junk in JUNK_ANSWERS)


def test_images_that_do_not_open_are_named(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"\x89PNG broken")
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")

    class WithImages(Sums):
        name = "good.png"

        def samples(self, split):
            return [Sample("p", [tmp_path / self.name], "?", 2)]

    task = WithImages()
    check_task(task)
    task.name = "bad.png"
    assert "'p': the image" in user_error(lambda: check_task(task))
    task.name = "missing.png"
    assert "missing.png" in user_error(lambda: check_task(task))


@pytest.mark.parametrize("error", [OSError, ValueError, SyntaxError, RuntimeError])
def test_an_image_that_pillow_refuses_in_any_way_is_named(monkeypatch, error):
    def refuse(_):
        raise error("broken header")

    class WithImage(Sums):
        def samples(self, split):
            return [Sample("p", [Path("a.png")], "?", 2)]

    monkeypatch.setattr(Image, "open", refuse)
    assert "'p': the image a.png cannot be read: broken header" in user_error(lambda: check_task(WithImage()))


def test_a_coordinate_task_has_one_image_per_sample():
    class Pointing(Sums):
        coordinates = True

    assert "exactly one image" in user_error(lambda: check_task(Pointing()))


def test_an_unknown_headline_is_refused():
    class Proud(Sums):
        headline = "accuracy"

    assert "headline is 'accuracy'" in user_error(lambda: check_task(Proud()))
