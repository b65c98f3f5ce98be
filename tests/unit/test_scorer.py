"""Scoring rollouts: the format part, and tags that must not earn anything."""

import functools
import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.refcoco import RefCOCO
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import check_ranges
from vlm_grpo.model.load import ModelConfig, load_vlm
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.rewards import RewardWorkers, ScoreConfig, score_trees
from vlm_grpo.rollout.sampling import sampler
from vlm_grpo.task import Reward, Sample, TaskAdapter
from vlm_grpo.tree.tags import format_mark, read_ids
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought


class Fixed(TaskAdapter):
    """Every answer earns the same."""

    def __init__(self, value: float = 1.0, part: str = "iou") -> None:
        self.value, self.part = value, part

    def samples(self, split: str) -> list[Sample]:
        return [Sample("s", [], "Where?", None)]

    def reward(self, sample: Sample, answer: str) -> Reward:
        return Reward(self.value, {self.part: 0.5})

    def reference_answer(self, sample: Sample) -> str:
        return ""


@functools.cache
def tiny_vlm() -> VLM:
    return load_vlm(ModelConfig(), 1.0, torch.device("cpu"))


@functools.cache
def referring() -> tuple[RefCOCO, Prompt]:
    task = RefCOCO(data="scenes", limit=1)
    return task, tiny_vlm().prompts.build(task.samples("train")[0], True)


@pytest.fixture
def vlm() -> VLM:
    return tiny_vlm()


def spoken(tokenizer: Any, thought: str, *answers: str) -> Thought:
    """A thought and its answers as if the model had written these texts, closing tags included."""

    def ids(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False) or [0])

    def facts(text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ids(text), torch.zeros(len(ids(text))), torch.zeros(len(ids(text)))

    of_thought = tuple(
        Answer(*facts(a), "</answer>" in a, *read_ids(tokenizer, ids(a).tolist(), "</answer>")) for a in answers
    )
    raw = tokenizer.decode(ids(thought))
    return Thought(*facts(thought), torch.tensor([1]), "</think>" in thought, thought, raw, of_thought)


def scored(vlm: VLM, task: TaskAdapter, thought: str, answer: str, weight: float = 0.0) -> Reward | None:
    tree = RolloutTree(vlm.prompts.build(task.samples("train")[0]), (spoken(vlm.tokenizer, thought, answer),))
    [result] = score_trees(RewardWorkers(task), [tree], ScoreConfig(weight))
    return result.rewards[0][0]


THOUGHT, ANSWER = "red left</think>", "[1, 2, 3, 4]</answer>"


@pytest.mark.parametrize(
    ("thought", "answer", "is_right", "earns"),
    [
        (THOUGHT, ANSWER, 1, 1),
        ("</think>", "</answer>", 1, 1),
        ("red left", ANSWER, 0, 1),  # cut off: the engine closed it
        (THOUGHT, "[1, 2, 3, 4]", 0, 1),  # cut off, or ended by the end-of-sequence id
        ("<think>red</think>", ANSWER, 0, 1),  # a task sees no thought
        ("a <answer>[1, 2, 3, 4]</answer></think>", ANSWER, 0, 1),
        (THOUGHT, "<answer>[1, 2, 3, 4]</answer>", 0, 0),
        (THOUGHT, "[1, 2, 3, 4]<answer>[5, 6, 7, 8]</answer>", 0, 0),
        (THOUGHT, "<think>no</think>[1, 2, 3, 4]</answer>", 0, 0),
        (THOUGHT, "[1, 2, 3, 4]</think></answer>", 0, 0),
        (THOUGHT, "[1, 2, 3, 4]<ANSWER>", 0, 0),
        (THOUGHT, "[1, 2, 3, 4]< answer >[5, 6, 7, 8]</answer>", 0, 0),  # parsers take it for a tag
        (THOUGHT, "[1, 2, 3, 4]</ answer></answer>", 0, 0),
        (THOUGHT, "<answers> 3 < 4 </answer>", 1, 1),  # no tags of ours
        (THOUGHT, "1</answer><answer>2</answer>", 0, 1),  # goes on after its end, where nothing is scored
    ],
)
def test_the_format_is_one_thought_and_one_answer(vlm: VLM, thought: str, answer: str, is_right: int, earns: int):
    reward = scored(vlm, Fixed(0.75), thought, answer, weight=0.5)
    assert reward == Reward(0.75 * earns + 0.5 * is_right, {"iou": 0.5, "format": float(is_right)})
    assert scored(vlm, Fixed(0.75), thought, answer) == Reward(0.75 * earns, {"iou": 0.5, "format": float(is_right)})


def test_tags_do_not_soften_a_negative_reward(vlm: VLM) -> None:
    reward = scored(vlm, Fixed(-2.0), THOUGHT, "<answer>x</answer>", weight=1.0)
    assert reward is not None and reward.value == -2.0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<answer>", "</answer>", "<think>", "</think>", "[50, 50, 100, 100]", "[0, 0, 1, 1]", " a"])
    ),
)
def test_no_arrangement_of_tags_earns_more_than_the_one_plain_answer(pieces: list[str]) -> None:
    vlm = tiny_vlm()
    task, prompt = referring()
    text = "".join(pieces)
    tree = RolloutTree(
        prompt, (spoken(vlm.tokenizer, THOUGHT, text, task.reference_answer(prompt.sample) + "</answer>"),)
    )
    [result] = score_trees(RewardWorkers(task), [tree], ScoreConfig(0.5))
    odd, plain = result.rewards[0]
    assert odd is not None and plain is not None and odd.value <= plain.value
    before_end = text.partition("</answer>")[0]
    if re.search("</?(answer|think)>", before_end):
        assert odd.value == 0 and odd.parts["format"] == 0


def test_a_tag_that_is_a_special_token_is_seen_although_no_text_shows_it(vlm: VLM) -> None:
    special = vlm.prompts.with_own_processor().tokenizer
    special.add_special_tokens({"additional_special_tokens": ["<answer>", "</think>"]})
    hidden = spoken(special, THOUGHT, "[1, 2]<answer>[3, 4]</answer>", ANSWER)
    assert "<answer>" not in hidden.answers[0].text
    nested, plain = (format_mark(hidden.raw, answer.raw) for answer in hidden.answers)
    assert (nested.is_right, nested.nests_tags, plain.is_right, plain.nests_tags) == (False, True, True, False)


@pytest.mark.slow
def test_marks_of_rollouts_equal_a_pattern_over_the_whole_transcript(vlm: VLM) -> None:
    config = RolloutConfig(num_thoughts=6, num_answers=6, max_thought_length=9, max_answer_length=14, temperature=1.6)
    hot = VLM(vlm.model, vlm.processor, temperature=1.6)
    [sample] = RefCOCO(data="scenes", limit=1).samples("train")
    prompt = hot.prompts.build(sample, True)
    with torch.no_grad():
        features = hot.encode([prompt])
        [tree] = Engine(hot, config).rollout([prompt], features, sampler(config, torch.Generator().manual_seed(0)))
    inside = r"((?!</?(?:think|answer)>).)*"
    pattern = re.compile(rf"<think>{inside}</think>\s*<answer>{inside}</answer>", re.DOTALL)
    found = []
    for thought in tree.thoughts:
        for answer in thought.answers:
            mark = format_mark(thought.raw, answer.raw)
            ids = torch.cat([thought.ids, thought.bridge_ids, answer.ids])
            transcript = "<think>" + hot.tokenizer.decode(ids, skip_special_tokens=False)
            assert mark.is_right == (thought.closed and pattern.fullmatch(transcript) is not None)
            found.append(mark.is_right)
    assert 3 < sum(found) < len(found) - 3, "both kinds must be there"


def test_a_part_of_that_name_is_the_trainers_own(vlm: VLM) -> None:
    with pytest.raises(UserError, match=r"Fixed: its reward has a part 'format'.*another name"):
        scored(vlm, Fixed(part="format"), THOUGHT, ANSWER)


@pytest.mark.parametrize("weight", [-0.1, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(UserError, match=r"format_weight=.*at least 0"):
        check_ranges(ScoreConfig(weight))


class Together(TaskAdapter):
    """The reward is the number of letters, and comes when four answers are being scored at the same time."""

    reward_threads = 4

    def __init__(self) -> None:
        self.barrier = threading.Barrier(4, timeout=60)

    def samples(self, split: str) -> list[Sample]:
        return [Sample(name, [], "Say something", None, task="together") for name in "ab"]

    def reward(self, sample: Sample, answer: str) -> Reward:
        self.barrier.wait()
        if "!" in answer:
            raise ValueError(answer)
        return Reward(len(answer) + 10.0 * (sample.id == "b"))

    def reference_answer(self, sample: Sample) -> str:
        return "x"


def test_answers_are_scored_at_the_same_time_where_the_task_says_that_they_may_be() -> None:
    workers = RewardWorkers({"together": Together(), "fixed": Fixed(0.5)})
    [first, second] = workers.by_name["together"].adapter.samples("train")
    other = Sample("s", [], "Where?", None, task="fixed")
    answers = [(first, "x"), (second, "xx"), (other, ""), (first, "xxx"), (second, "x" * 4)]
    assert [reward.value for reward in workers.score_all(answers) if reward] == [1, 12, 0.5, 3, 14]
    with pytest.raises(UserError, match=r"sample 'b': reward\(\) raised ValueError: no!"):
        workers.score_all([(first, "x"), (second, "no!"), (first, "x"), (first, "x")])


def test_no_thread_scores_nothing() -> None:
    class Idle(Fixed):
        reward_threads = 0

    with pytest.raises(UserError, match="reward_threads is 0; at least 1"):
        RewardWorkers(Idle())
