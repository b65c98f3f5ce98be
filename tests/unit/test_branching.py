"""Thoughts that branch on their way: exact at any depth, branched where sentences end, compared with their siblings.

Letters: K thoughts, B branches, M answers, V vocabulary.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support import families
from support.exact import gradients, inputs_of, make_prompt, relative_error, unpacked
from support.exact import make_vlm as make_any
from support.steps import CONFIG as STEP
from support.steps import Oracle, Watch, by_hash, make_samples, make_trainer, off_policy, perturb, standardised
from support.steps import make_vlm as make_tempered
from support.steps import relative_error as relative_error_of_all
from torch import Tensor

from vlm_grpo.algorithm.advantage import RULES, AdvantageConfig, group_advantages, tree_values
from vlm_grpo.algorithm.check import check
from vlm_grpo.algorithm.minibatch import trained_lengths
from vlm_grpo.algorithm.objectives import LossConfig
from vlm_grpo.algorithm.shaping import path_divergence, path_lengths, segment_lengths
from vlm_grpo.algorithm.stats import branch_metrics, step_metrics
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.config import layered_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.features import join_features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.cache import TreeCache
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.rewards import ScoredTree
from vlm_grpo.rollout.sampling import greedy, sampler, tree_sampler
from vlm_grpo.task import Reward, Sample
from vlm_grpo.tree.branching import BLANK, END, FullTree, SentenceEnds, token_texts
from vlm_grpo.tree.pack import pack, tree_segments, with_weights
from vlm_grpo.tree.tags import format_mark
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought

NAN = math.nan
CONFIG = RolloutConfig(num_thoughts=2, num_answers=2, max_thought_length=14, max_answer_length=4)
# What goes on from what: thought 0 ends at once, 1 goes on as 2 and 5, and 2 as 3 and 4; num_levels=4
PARENTS = [-1, -1, 1, 2, 2, 1]


def branch_at(engine: Engine, every: int) -> None:
    """Let one token in so many end a sentence, so that random text branches often and after pieces of all lengths."""
    width = len(engine.growth.ends.table[0])
    engine.growth.ends = SentenceEnds(["w." if i % every == 0 else "w" for i in range(width)])


def grow(vlm: VLM, num_levels: int, draw=None, config: RolloutConfig = CONFIG, every: int = 5, **branching):
    """Trees of two prompts. Some tokens end a sequence: thoughts and answers of all lengths, at all depths."""
    count = 1 if vlm.family.is_vision else 0
    questions = ("Where is the red box?", "the box")
    prompts = [make_prompt(vlm, count, seed, questions[seed]) for seed in range(2)]
    features = vlm.encode(prompts)
    vlm.eos_ids = frozenset(range(0, len(vlm.tokenizer), 13)) - set(vlm.forbidden.tolist())
    draw = draw or sampler(config, torch.Generator().manual_seed(3))
    engine = Engine(vlm, replace(config, num_levels=num_levels, **branching))
    branch_at(engine, every)
    return engine, engine.rollout(prompts, features, draw), features


def depth(tree: RolloutTree) -> int:
    return max(len(tree.pieces(i)) for i in range(len(tree.thoughts)))


def with_random_weights(trees: Sequence[RolloutTree], seed: int = 0):
    """The trees' segments with random weights."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    made = []
    for tree in trees:
        k, m = len(tree.thoughts), CONFIG.num_answers
        ones = torch.ones(k), torch.ones(k, m)
        made.append(with_weights(tree_segments(tree), *ones, numbers(k), numbers(k, m)))
    return made


# ---- exactness ----


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("name", "attention", "num_levels"),
    [
        ("qwen2_5_vl", "sdpa", 3),
        ("qwen2_5_vl", "levels", 4),
        ("gpt2", "sdpa", 4),
        ("qwen3_5", "levels", 3),
        ("qwen3_5_text", "levels", 4),
    ],
)
def test_grown_trees_have_the_logprobs_and_gradients_of_the_unpacked_model(name, attention, num_levels) -> None:
    vlm = make_any(name, attention=attention)
    _, trees, features = grow(vlm, num_levels)
    assert max(map(depth, trees)) == num_levels - 1
    finished = {len(tree.pieces(i)) for tree in trees for i, t in enumerate(tree.thoughts) if t.answers}
    assert len(finished) > 1, "some thoughts end before the last level"
    segments = with_random_weights(trees)
    row = pack(segments)
    logprobs = vlm.logprobs(row, join_features(features))
    (logprobs * row.weights).sum().backward()
    ours = gradients(vlm.model)

    plain = families.load_model(name)
    expected = unpacked(plain, vlm, segments)
    (expected * row.weights).sum().backward()
    tower = vlm.family.vision_modules or ("no tower",)
    theirs = {n: g for n, g in gradients(plain).items() if not n.startswith(tower)}
    assert len(logprobs) == sum(tree.num_sampled for tree in trees)
    # recorded in float32; the norms of Qwen2.5-VL run in float32
    torch.testing.assert_close(row.old_logprobs.double(), expected.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    assert relative_error({n: g for n, g in ours.items() if n in theirs}, theirs) <= 1e-6


@pytest.mark.parametrize(("name", "attention"), [("qwen2_5_vl", "sdpa"), ("gpt2", "sdpa"), ("qwen3_5_text", "levels")])
def test_greedy_branches_equal_generate_along_their_path(name: str, attention: str) -> None:
    vlm = make_any(name, attention=attention)
    _, trees, _ = grow(vlm, 4, greedy, replace(CONFIG, rollout_lanes=1), every=3)
    plain = families.load_model(name)
    plain.generation_config.eos_token_id = sorted(vlm.eos_ids)
    forbidden = vlm.forbidden.tolist()
    assert max(map(depth, trees)) == 3
    for tree in trees:
        inputs = inputs_of(vlm, tree.prompt)
        thought = families.greedy(plain, inputs, CONFIG.max_thought_length, forbidden).tolist()
        answers = {}
        for i, last in enumerate(tree.thoughts):
            ids = torch.cat([piece.ids for piece in tree.pieces(i)])
            assert ids.tolist() == thought[: len(ids)]
            if last.answers:
                assert len(ids) == len(thought)
                given = torch.cat([ids, last.bridge_ids])
                if not answers:
                    longer = families.extended(inputs, given)
                    answers[()] = families.greedy(plain, longer, CONFIG.max_answer_length, forbidden).tolist()
                assert [a.ids.tolist() for a in last.answers] == [answers[()]] * CONFIG.num_answers


# ---- where sentences end ----

ENDS = re.compile(r"(?:\n|(?<!\d)\.|[!?。！？])[\s\"')\]}”’»）］】」』]*$")  # noqa: RUF001


def ends_sentence(text: str) -> bool:
    """The rule, read off the text so far."""
    found = ENDS.search(text)
    return found is not None and any(c.isalnum() for c in text[: found.start()])


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("It is red.", True),
        ("It is red", False),
        ("It is 3.", False),
        ("It is 3.5", False),
        ("It is 3.\n", True),
        ("v 3!", True),
        ('He said "no."', True),
        ("(red?) ", True),
        ("it (", False),
        ("\n", False),
        (" . \n", False),
        ("1\n", True),
        ("红色。", True),
        ("真的？」", True),  # noqa: RUF001
        ("red. Th", False),
    ],
)
def test_sentences_end_where_a_reader_sees_it(text: str, ends: bool) -> None:
    assert ends_sentence(text) == ends
    for pieces in ([text], [*text], [text[:2], text[2:]]):
        table, state = SentenceEnds(pieces).table, BLANK
        for token in range(len(pieces)):
            state = table[state][token]
        assert (state == END) == ends


def test_table_of_sentence_ends_equals_reading_the_text() -> None:
    pieces = ["a", "7", ".", "!", "\n", " ", '"', ")", "b.", "3.", ".5", '."', "? ", "(", "。", "x.\n\n", "", "£"]
    table = SentenceEnds(pieces).table
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(3000):
        state, text = BLANK, ""
        for token in torch.randint(len(pieces), (10,), generator=generator).tolist():
            text += pieces[token]
            state = table[state][token]
            assert (state == END) == ends_sentence(text), repr(text)
            seen.add(state)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama", "gemma3"])
def test_texts_of_tokens_add_up_to_the_text(name: str) -> None:
    tokenizer = getattr(families.load_processor(name), "tokenizer", families.load_processor(name))
    texts = token_texts(tokenizer)
    assert len(texts) == len(tokenizer) and texts[tokenizer.eos_token_id] == ""
    for text in ("It is 3.5 m. Really?\nYes (so .) it is!", "a\n\n b. "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(texts[i] for i in ids).strip() == text.strip()


def liking(vlm: VLM, text: str, seed: int = 0, by: float = 4.0):
    """Draws ASCII tokens at random, those of this text more often. A part of another character is one of a word."""
    others = [i for i, text in enumerate(token_texts(vlm.tokenizer)) if not text.isascii()]
    liked = vlm.tokenizer.encode(text, add_special_tokens=False)
    generator = torch.Generator().manual_seed(seed)

    def draw(logprobs: Tensor, trees: Sequence[int]) -> Tensor:
        weights = (logprobs / 4).exp()
        weights[:, liked] *= by
        weights[:, others] = 0
        return torch.multinomial(weights, 1, generator=generator)[:, 0]

    return draw


@pytest.mark.parametrize(("name", "shortest"), [("gpt2", 1), ("gpt2", 4), ("qwen3_5_text", 2)])
def test_thoughts_branch_exactly_where_sentences_end(name: str, shortest: int) -> None:
    vlm = make_any(name, torch.float32, attention="levels" if name == "qwen3_5_text" else "sdpa")
    config = replace(CONFIG, num_thoughts=4, max_thought_length=40)
    vlm.eos_ids = vlm.eos_ids | {vlm.tokenizer.encode("z", add_special_tokens=False)[0]}
    engine = Engine(vlm, replace(config, num_levels=4, num_branches=3, min_branch_length=shortest))
    prompt = make_prompt(vlm, 0)
    [tree] = engine.rollout([prompt], [None], liking(vlm, 'a.b 3.!\n")z', by=30.0))
    branched = finished_early = 0
    for i, thought in enumerate(tree.thoughts):
        pieces = tree.pieces(i)
        children = [t for t in tree.thoughts if t.parent == i]
        read = [vlm.tokenizer.decode(thought.ids[:n], skip_special_tokens=True) for n in range(len(thought.ids) + 1)]
        may_branch = [n for n, text in enumerate(read) if n >= shortest and ends_sentence(text)]
        length = sum(len(piece.ids) for piece in pieces)
        if children:
            branched += 1
            assert len(children) == 3 and not thought.answers and not len(thought.bridge_ids) and thought.closed
            assert may_branch == [len(thought.ids)] and length < config.max_thought_length
        else:
            assert len(thought.answers) == config.num_answers and len(thought.bridge_ids)
            is_cut = length == config.max_thought_length
            assert length <= config.max_thought_length
            assert thought.closed or is_cut or int(thought.ids[-1]) in vlm.eos_ids
            if len(pieces) < 3:
                finished_early += 1
                assert not [n for n in may_branch if n < len(thought.ids)]
        whole = torch.cat([piece.ids for piece in pieces])
        text = vlm.tokenizer.decode(whole, skip_special_tokens=True).partition("</think>")[0].strip()
        assert thought.text == text
    assert branched > 4 and finished_early > 0 and depth(tree) == 3
    assert [t.parent for t in tree.thoughts] == depth_first(tree)


def depth_first(tree: RolloutTree) -> list[int]:
    """Parents when the thoughts are listed by a walk."""
    order: list[int] = []

    def walk(parent: int) -> None:
        for i, thought in enumerate(tree.thoughts):
            if thought.parent == parent:
                order.append(i)
                walk(i)

    walk(-1)
    assert order == [*range(len(tree.thoughts))]
    return [tree.thoughts[i].parent for i in order]


def saying(vlm: VLM, *texts: str):
    """All branches say the same tokens, one after another, whatever the model thinks."""
    tokens = iter([t for text in texts for t in vlm.tokenizer.encode(text, add_special_tokens=False)])
    return lambda logprobs, trees: torch.full((len(logprobs),), next(tokens))


def test_a_thought_that_closes_early_gets_its_answers_and_its_whole_text_is_marked() -> None:
    vlm = make_any("gpt2", torch.float32)
    config = replace(CONFIG, max_thought_length=40)
    engine = Engine(vlm, replace(config, num_levels=4))
    # one piece, its two branches, and the end of the thought at once: the third level is never reached
    draw = saying(vlm, "ab 3.5 c.", "</think>", "ok")
    with pytest.raises(StopIteration):
        engine.rollout([make_prompt(vlm, 0)], [None], draw)
    draw = saying(vlm, "ab 3.5 c.", "</think>", "</answer>")
    [tree] = engine.rollout([make_prompt(vlm, 0)], [None], draw)
    assert [t.parent for t in tree.thoughts] == [-1, 0, 0, -1, 3, 3]
    assert [t.text for t in tree.thoughts] == ["ab 3.5 c."] * 6
    assert [len(t.answers) for t in tree.thoughts] == [0, 2, 2, 0, 2, 2]
    assert tree.num_answers == 8
    last = tree.thoughts[1]
    assert vlm.tokenizer.decode(last.ids) == "</think>" and last.closed
    assert all(format_mark(last.raw, answer.raw).is_right for answer in last.answers)
    assert tree.thoughts[0].raw == "ab 3.5 c." and last.raw == "ab 3.5 c.</think>"
    assert not any(format_mark(last.raw + last.raw, answer.raw).is_right for answer in last.answers)


def test_a_tree_as_large_as_can_be_fills_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = make_any("gpt2", torch.float32)
    config = replace(CONFIG, ignore_eos=True)
    engine = Engine(vlm, replace(config, num_levels=4, num_branches=3, min_branch_length=2))
    every = len(engine.growth.ends.table[0])
    engine.growth.ends = SentenceEnds(["w."] * every)  # every piece is as short as it may be
    prompt = make_prompt(vlm, 0)
    shapes, read = [], []
    original = TreeCache.update

    def watch(self, keys, values, layer, *args, **kwargs):
        out = original(self, keys, values, layer, *args, **kwargs)
        shapes.append(out[0].shape[2])
        return out

    monkeypatch.setattr(TreeCache, "update", watch)
    vlm.base.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    [tree] = engine.rollout([prompt], [None], sampler(config, torch.Generator().manual_seed(0)))
    assert [len(t.ids) for t in tree.thoughts if not t.answers] == [2] * (2 + 6)
    assert [len(t.ids) for t in tree.thoughts if t.answers] == [14 - 4] * 18
    leaves = tree.num_answers
    assert leaves == 2 * 3 * 3 * 2
    assert max(shapes) == engine.growth.slots(len(prompt.ids)) - leaves  # an answer's last token is never fed
    assert sum(read) == max(shapes), "equal lengths leave no padding: each token is read once"
    # the longest path decides the number of blocks: to branch costs none
    assert len(read) == 1 + config.max_thought_length + config.max_answer_length - 1


@pytest.mark.slow
def test_same_seed_same_tree_and_neighbours_do_not_matter() -> None:
    vlm = make_any("gpt2")
    prompts = [make_prompt(vlm, 0, seed, question) for seed, question in enumerate(("the box", "Where is it?", "a"))]

    def ids(chosen: list[int], slots: int, first: int = 0) -> dict[int, list]:
        engine = Engine(vlm, replace(CONFIG, rollout_lanes=slots, num_levels=3))
        branch_at(engine, 5)
        draw = tree_sampler(CONFIG, [torch.Generator().manual_seed(first + seed) for seed in chosen])
        trees = engine.rollout([prompts[i] for i in chosen], [None] * len(chosen), draw)
        return {
            i: [(t.parent, x.ids.tolist()) for t in tree.thoughts for x in (t, *t.answers)]
            for i, tree in zip(chosen, trees, strict=True)
        }

    together = ids([0, 1, 2], 8)
    assert any(parent >= 0 for tree in together.values() for parent, _ in tree)
    assert together == ids([0, 1, 2], 8) == ids([2, 0, 1], 2) == ids([1, 2, 0], 1)
    assert together != ids([0, 1, 2], 8, first=7)


def test_numbers_of_the_full_tree_are_the_two_levels_of_old_and_know_their_parents() -> None:
    two = FullTree(3, 2, 2, 4)
    assert two.parents == [-1, 0, 0, 0, *[1] * 4, *[2] * 4, *[3] * 4]
    assert [list(two.answers(1 + k)) for k in range(3)] == [[4 + 4 * k + j for j in range(4)] for k in range(3)]
    assert not any(two.branches(k) for k in (1, 2, 3)) and list(two.branches(0)) == [1, 2, 3]
    full = FullTree(2, 3, 4, 2)
    assert len(full.parents) == 1 + 2 + 6 + 18 + 36
    for segment in range(9):
        assert {full.parents[child] for child in full.branches(segment)} == {segment}
    for thought in range(1, 27):
        for answer in full.answers(thought):
            above = [answer]
            while above[-1] > 0:
                above.append(full.parents[above[-1]])
            assert thought in above


# ---- advantages ----


def test_advantages_of_four_levels_by_hand() -> None:
    # V: thought 0 1; 3: 0, 4: 1, so 2: 1/2; 5: 0, so 1: (1/2 + 0) / 2 = 1/4, and not 1/3, the mean of its six answers
    rewards = torch.tensor([[1.0, 1.0], [NAN, NAN], [NAN, NAN], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5]])
    values = tree_values(torch.tensor([1.0, NAN, NAN, 0.0, 1.0, 0.0]), PARENTS)
    assert values.tolist() == [1.0, 0.25, 0.5, 0.0, 1.0, 0.0]
    result = group_advantages(rewards, AdvantageConfig(advantage="mean"), PARENTS)
    assert result.thoughts.tolist() == [0.375, -0.375, 0.25, -0.5, 0.5, -0.25]
    assert result.answers.tolist() == [[0.0, 0.0]] * 5 + [[0.5, -0.5]]
    root = math.sqrt(0.5)
    result = group_advantages(rewards, AdvantageConfig(advantage_epsilon=0.0), PARENTS)
    assert result.thoughts.tolist() == pytest.approx([root, -root, root, -root, root, -root])
    assert result.answers[5].tolist() == pytest.approx([root, -root])
    assert group_advantages(rewards, AdvantageConfig(advantage="rloo"), PARENTS).thoughts.tolist() == pytest.approx(
        [0.75, -0.75, 0.5, -1.0, 1.0, -0.5]
    )
    assert result.valid_thoughts.all() and result.valid_answers.tolist() == (~rewards.isnan()).tolist()
    # by the prompt, as asked for: eight answers, mean 1/2
    by_prompt = group_advantages(rewards, AdvantageConfig(advantage="mean", answer_baseline="prompt"), PARENTS)
    assert by_prompt.answers.tolist() == [[0.5, 0.5], [0, 0], [0, 0], [-0.5, -0.5], [0.5, 0.5], [0.0, -1.0]]
    # thoughts that have answers: V 1, 0, 1, 0 around 1/2; within, only the last ones' 1/2 twice
    stats = result.stats
    assert (stats.reward_mean, stats.between_thoughts, stats.within_thoughts) == (0.5, 0.25, 0.0625)


def test_pieces_without_a_reward_below_them_are_in_no_mean() -> None:
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [NAN, NAN], [NAN, NAN], [NAN, NAN], [0.5, 0.0]])
    result = group_advantages(rewards, AdvantageConfig(advantage="mean"), PARENTS)
    assert result.valid_thoughts.tolist() == [True, True, False, False, False, True]
    assert result.thoughts.tolist() == [0.375, -0.375, 0.0, 0.0, 0.0, 0.0]  # 1 and 1/4; 5 has no sibling
    assert result.answers[5].tolist() == [0.25, -0.25] and not result.answers[:5].any()


def random_tree(seed: int) -> tuple[list[int], Tensor]:
    """Parents, depth first, and rewards of a tree of up to four levels of thoughts."""
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []

    def add(parent: int, depth: int) -> None:
        count = int(torch.randint(2, 4, (1,), generator=generator))
        for _ in range(count):
            parents.append(parent)
            if depth < 4 and torch.rand(1, generator=generator) < 0.5:
                add(len(parents) - 1, depth + 1)

    add(-1, 1)
    rewards = torch.rand((len(parents), 3), generator=generator, dtype=torch.float64)
    rewards = rewards.round() if seed % 3 == 1 else rewards
    if seed % 2:
        rewards[torch.rand(rewards.shape, generator=generator) < 0.4] = NAN
    rewards[sorted(set(parents) - {-1})] = NAN
    return parents, rewards


@pytest.mark.parametrize("seed", range(8))
def test_advantages_equal_nested_loops_over_siblings_and_sum_to_zero(seed: int) -> None:
    parents, rewards = random_tree(seed)

    def value(i: int) -> float:
        below = [value(j) for j, parent in enumerate(parents) if parent == i]
        known = [v for v in (below or rewards[i].tolist()) if not math.isnan(v)]
        return sum(known) / len(known) if known else NAN

    def centred(values: dict[int, float]) -> dict[int, float]:
        known = {i: v for i, v in values.items() if not math.isnan(v)}
        mean = sum(known.values()) / max(1, len(known))
        std = math.sqrt(sum((v - mean) ** 2 for v in known.values()) / max(1, len(known) - 1))
        return {i: (v - mean) / (std + 0.01) if std > 1e-12 else 0.0 for i, v in known.items()}

    result = group_advantages(rewards, AdvantageConfig(advantage_epsilon=0.01), parents)
    expected: dict[int, float] = {}
    for parent in {-1, *parents}:
        siblings = {i: value(i) for i, p in enumerate(parents) if p == parent}
        expected |= centred(siblings)
        assert abs(sum(float(result.thoughts[i]) for i in siblings)) < 1e-12
    assert result.thoughts.tolist() == pytest.approx([expected.get(i, 0.0) for i in range(len(parents))], abs=1e-12)
    assert result.valid_thoughts.tolist() == [i in expected for i in range(len(parents))]
    for i, row in enumerate(rewards.tolist()):
        of_row = centred(dict(enumerate(row)))
        assert result.answers[i].tolist() == pytest.approx([of_row.get(j, 0.0) for j in range(3)], abs=1e-12)
        assert abs(float(result.answers[i].sum())) < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_two_levels_are_bit_for_bit_what_siblings_of_the_prompt_are(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(5, 3, generator=generator)
    rewards[torch.rand(5, 3, generator=generator) < 0.2] = NAN
    for name in RULES:
        config = AdvantageConfig(advantage=name, answer_baseline="prompt")
        plain, deep = group_advantages(rewards, config), group_advantages(rewards, config, [-1] * 5)
        assert torch.equal(plain.thoughts, deep.thoughts) and torch.equal(plain.answers, deep.answers)
        assert torch.equal(plain.answers, group_advantages(rewards, AdvantageConfig(advantage=name)).answers)


# ---- what follows a tree into the update ----


def hand_made() -> RolloutTree:
    """The tree of PARENTS with pieces of 3, 2, 4, 1, 5, 2 tokens and answers of 1 and 2; the last thought was cut."""
    ids = torch.tensor([1, 2])
    prompt = Prompt(Sample("s", [], "q", None), "q", ids, torch.arange(2)[None], torch.tensor([-1, -1]), {})

    def fields(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ones(count, dtype=torch.long), torch.zeros(count), torch.full((count,), 0.25)

    thoughts = []
    for i, (count, parent) in enumerate(zip((3, 2, 4, 1, 5, 2), PARENTS, strict=True)):
        answers = () if i in PARENTS else tuple(Answer(*fields(n), True, "", "") for n in (1, 2))
        thoughts.append(Thought(*fields(count), ids[:0], i != 5, "", "", answers, parent))
    return RolloutTree(prompt, tuple(thoughts))


def test_lengths_and_divergences_of_paths_are_over_all_their_pieces() -> None:
    tree = hand_made()
    answers = torch.tensor(tree.by_answer(lambda _: True, none=False))
    expected = torch.tensor([[4, 5], [0, 0], [0, 0], [8, 9], [12, 13], [5, 6]])
    assert torch.equal(path_lengths(tree) * answers, expected)
    assert segment_lengths(tree) == [3, 1, 2, 2, 4, 1, 1, 2, 5, 1, 2, 2, 1, 2]
    assert tree.num_sampled == 17 + 4 * 3 and tree.num_answers == 8
    ref = torch.full((tree.num_sampled,), -0.1, dtype=torch.float64)
    divergence, total = path_divergence(tree, ref, LossConfig(kl_estimator="k1"))
    torch.testing.assert_close(divergence * answers, 0.1 * expected.double())
    assert total == pytest.approx(2.9)
    config = replace(STEP, mask_truncated_completions=True)
    thoughts, of_answers = trained_lengths(tree, config)
    assert thoughts.tolist() == [3, 2, 4, 1, 5, 0]  # a piece that was branched was not cut
    assert of_answers.tolist() == [[1, 2], [0, 0], [0, 0], [1, 2], [1, 2], [1, 2]]


def test_metrics_of_branched_trees_by_hand() -> None:
    tree = hand_made()
    graded = tuple(() if i in PARENTS else (Reward(1.0), Reward(float(i == 0))) for i in range(6))
    scored = ScoredTree(tree, (), graded)
    assert scored.values.isnan().tolist() == [[i in PARENTS] * 2 for i in range(6)]
    advantages = group_advantages(scored.values, AdvantageConfig(), PARENTS)
    metrics = step_metrics([(scored, advantages)], Processes()) | branch_metrics([tree], Processes())
    expected = {
        "reward": 5 / 8,
        "answers_without_reward": 0.0,
        "thoughts/mean_length": (3 + 7 + 11 + 4) / 4,  # whole thoughts
        "thoughts/clipped_ratio": 1 / 4,
        "answers/mean_length": 1.5,
        "entropy": 0.25,
        "num_tokens": 29.0,
        "reward_between_thoughts": 3 / 64,  # V 1, 1/2, 1/2, 1/2 around 5/8
        "thoughts/branched_ratio": 1 / 2,
        "thoughts/mean_pieces": (1 + 3 + 3 + 2) / 4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


class DeepOracle(Oracle):
    """The objective of trees of any depth by nested loops: siblings are compared, all pieces are of one level."""

    def _tree(self, tree: RolloutTree, rewards: list[list[float | None]]) -> Tensor:
        def value(i: int) -> float | None:
            below = [value(j) for j, t in enumerate(tree.thoughts) if t.parent == i]
            known = [v for v in (below or rewards[i]) if v is not None]
            return sum(known) / len(known) if known else None

        of_thought: dict[int, float] = {}
        of_answer: dict[tuple[int, int], float] = {}
        for parent in range(-1, len(tree.thoughts)):
            siblings = {i: value(i) for i, t in enumerate(tree.thoughts) if t.parent == parent}
            known = {i: v for i, v in siblings.items() if v is not None}
            if known:
                of_thought |= dict(zip(known, compared(known.values()), strict=True))
        for i, row in enumerate(rewards):
            earned = {(i, j): r for j, r in enumerate(row) if r is not None}
            if earned:
                of_answer |= dict(zip(earned, compared(earned.values()), strict=True))
        total = torch.zeros((), dtype=torch.float64)
        for i, advantage in of_thought.items():
            thought = tree.thoughts[i]
            ids = torch.cat([piece.ids for piece in tree.pieces(i)])
            branch = self._branch(tree.prompt, ids, len(thought.ids), thought.logprobs, advantage)
            total = total + branch / len(of_thought)
        for (i, j), advantage in of_answer.items():
            thought, answer = tree.thoughts[i], tree.thoughts[i].answers[j]
            ids = torch.cat([*(piece.ids for piece in tree.pieces(i)), thought.bridge_ids, answer.ids])
            branch = self._branch(tree.prompt, ids, len(answer.ids), answer.logprobs, advantage)
            total = total + self.config.answer_weight * branch / len(of_answer)
        return total


def compared(values) -> list[float]:
    values = list(values)
    return standardised(values) if len(values) > 1 else [0.0]


@pytest.mark.parametrize(
    ("name", "num_levels", "options"),
    [("gpt2", 4, {"beta": 0.3, "answer_weight": 0.5}), ("qwen2_5_vl", 3, {"epsilon_high": 0.3, "num_branches": 3})],
)
def test_loss_and_gradient_of_a_step_equal_nested_loops(name: str, num_levels: int, options: dict) -> None:
    vlm = make_tempered(name)
    vlm.keep_reference()
    tower = vlm.family.vision_modules or ("no tower",)
    for n, weight in vlm.model.named_parameters():
        weight.requires_grad_(not n.startswith(tower))
    perturb(vlm.model, 0.01)
    start = {n: w.clone() for n, w in vlm.model.state_dict().items()}
    config = replace(STEP, num_thoughts=2, max_thought_length=9, num_levels=num_levels, **options)
    trainer = make_trainer(vlm, config)
    branch_at(trainer.engine, 4)

    watch = Watch(trainer, off_policy)
    result = trainer.step(1, make_samples((1, 0) if vlm.family.is_vision else (0, 0)))
    assert max(map(depth, watch.trees)) == num_levels - 1

    plain, reference = families.load_model(name), families.load_model(name)
    plain.load_state_dict(start)
    loss = DeepOracle(plain, reference, vlm, by_hash, config).loss(watch.trees)
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None and not n.startswith(tower)}
    # advantages and token weights are float32; everything after them is float64
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert relative_error_of_all(watch.gradients[0], expected) < 1e-6
    tokens = sum(tree.num_sampled for tree in watch.trees)
    assert result.num_tokens == result.metrics["num_tokens"] == tokens
    assert len(result.rows) == sum(tree.num_answers for tree in watch.trees)
    assert 0 < result.metrics["thoughts/branched_ratio"] <= 1 < result.metrics["thoughts/mean_pieces"]
    rows = iter(result.rows)
    for tree in watch.trees:
        for i, thought in enumerate(tree.thoughts):
            whole = torch.cat([piece.ids for piece in tree.pieces(i)])
            text = vlm.tokenizer.decode(whole, skip_special_tokens=True).partition("</think>")[0].strip()
            for answer in thought.answers:
                row = next(rows)
                assert (row.thought, row.model_answer) == (text, answer.text)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": "mean", "loss_type": "dr_grpo", "soft_punish_cache": 9, "max_tokens_per_row": 1},
        {"advantage": "reinforce_pp", "loss_type": "dapo", "kl_in": "reward", "beta": 0.1, "diagnostics_every": 1},
        {"advantage": "gpg", "loss_type": "gpg", "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        {"advantage": "rloo", "loss_type": "gspo", "importance_sampling_cap": 2.0, "dynamic_sampling": "drop"},
    ],
    ids=lambda options: options["advantage"],
)
def test_other_objectives_take_branched_trees(options: dict) -> None:
    config = replace(STEP, num_thoughts=2, max_thought_length=9, num_levels=3, **options)
    trainer = make_trainer(make_tempered("gpt2"), config)
    branch_at(trainer.engine, 4)
    if config.beta > 0:
        trainer.vlm.keep_reference()
    watch = Watch(trainer)
    metrics = trainer.step(1, make_samples((0, 0))).metrics
    assert max(map(depth, watch.trees)) == 2
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    if config.soft_punish_cache:
        lengths = [
            sum(len(piece.ids) for piece in tree.pieces(i)) + len(answer.ids)
            for tree in watch.trees
            for i, thought in enumerate(tree.thoughts)
            for answer in thought.answers
        ]
        over = [min(1.0, max(0.0, n - (9 + 4 - 9)) / 9) for n in lengths]
        assert metrics["overlong_penalty"] == pytest.approx(-sum(over) / len(over))
    if config.diagnostics_every:
        whole = metrics["grad_norm/thoughts"] ** 2 + metrics["grad_norm/answers"] ** 2
        whole += 2 * metrics["grad_cosine"] * metrics["grad_norm/thoughts"] * metrics["grad_norm/answers"]
        assert metrics["grad_norm"] ** 2 == pytest.approx(whole, rel=1e-6)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_levels": 1}, "num_levels=1: must be at least 2"),
        ({"num_levels": 3, "num_branches": 1}, "num_branches=1: must be at least 2"),
        ({"num_levels": 3, "min_branch_length": 0}, "min_branch_length=0: must be at least 1"),
        ({"num_branches": 3}, "num_branches=3 does nothing with num_levels=2, which branches no thought"),
        ({"min_branch_length": 5}, "min_branch_length=5 does nothing with num_levels=2"),
        ({"num_levels": 4, "min_branch_length": 8}, "after 16 tokens or more, where max_thought_length=16 cuts"),
    ],
)
def test_options_that_branch_nothing_are_refused_with_the_reason(options: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(layered_config(StepConfig, None, [(options, "here")]))
    check(StepConfig(num_levels=3, num_branches=2, min_branch_length=15))


@pytest.mark.parametrize(
    ("options", "num_answers", "named"),
    [
        ({"credit": "sequence", "advantage": "rloo"}, 4, "num_levels=3 with credit=sequence, .*use credit=segment"),
        ({"advantage": "grpo"}, 4, "num_levels=3 with advantage=grpo, .*mean of its answers"),
        ({"advantage": "reinforce"}, 4, "num_levels=3 with advantage=reinforce, which compares nothing"),
        ({}, 1, "num_answers=1 and answer_baseline=auto compares every answer with itself"),
        ({"answer_baseline": "thought"}, 1, "num_answers=1 and answer_baseline=thought"),
    ],
)
def test_combinations_without_siblings_are_refused_with_the_reason(options, num_answers, named) -> None:
    with pytest.raises(UserError, match=named):
        check(StepConfig(**options, num_answers=num_answers, num_levels=3))


def test_other_combinations_are_not_refused() -> None:
    for name in set(RULES) - {"grpo", "reinforce"}:
        for baseline in ("auto", "prompt", "thought"):
            config = replace(STEP, num_levels=3, num_thoughts=1, max_thought_length=8, advantage=name)
            check(replace(config, answer_baseline=baseline))
        check(replace(config, num_answers=1, answer_baseline="prompt"))
