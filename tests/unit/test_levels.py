"""Trees run level by level: models with linear attention equal their unpacked selves, and others their packed rows.

Letters: B segments of a batch, L tokens of each.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import families
from support.exact import allowed_ids, gradients, inputs_of, make_prompt, relative_error, unpacked
from support.exact import make_vlm as make_any
from support.families import LINEAR_FAMILIES

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.backend import Environment, choose_backend
from vlm_grpo.model.features import join_features
from vlm_grpo.model.levels import plan_levels
from vlm_grpo.model.load import ModelConfig, attention_summary, load_vlm
from vlm_grpo.model.states import hold_states_over_padding
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.sampling import greedy, sampler
from vlm_grpo.tree.pack import Segment, TreePack, pack, tree_segments
from vlm_grpo.tree.types import Prompt

# (length, children): thoughts of like and unlike lengths, so that some batches are padded and some are not
LEAVES = ((3, ()), (1, ()), (7, ()))
TWO_DEEP = ((6, LEAVES[:2]), (5, LEAVES), (2, LEAVES[1:]), (5, ()))
THREE_DEEP = ((3, ((4, LEAVES), (2, ()), (1, LEAVES[:2]))), (1, ()), (4, ((5, LEAVES[1:]), (4, LEAVES[:1]))))
CONFIG = RolloutConfig(num_thoughts=3, num_answers=2, max_thought_length=9, max_answer_length=6)


def make_vlm(name: str, dtype: torch.dtype = torch.float64, **options) -> VLM:
    return make_any(name, dtype, **{"attention": "levels", **options})


def make_tree(vlm: VLM, prompt: Prompt, shape: Sequence, seed: int) -> list[Segment]:
    """Segments below a prompt, depth first; the last token of an inner one is forced where it has two or more."""
    generator = torch.Generator().manual_seed(seed)
    ids = allowed_ids(vlm)
    tree = [Segment(prompt.ids, -1, prompt=prompt)]

    def grow(parent: int, shape: Sequence) -> None:
        for count, children in shape:
            chosen = ids[torch.randint(len(ids), (count,), generator=generator)]
            scored = count - 1 if children and count > 1 else count
            weight = float(torch.rand(1, generator=generator))
            tree.append(Segment(chosen, parent, scored, weight=weight))
            grow(len(tree) - 1, children)

    grow(0, shape)
    return tree


def make_row(vlm: VLM, images: Sequence[int], shape: Sequence = TWO_DEEP):
    prompts = [make_prompt(vlm, count, seed) for seed, count in enumerate(images)]
    trees = [make_tree(vlm, prompt, shape[seed:], seed) for seed, prompt in enumerate(prompts)]
    return trees, pack(trees), join_features(vlm.encode(prompts))


def values_and_gradients(vlm: VLM, images: Sequence[int], shape: Sequence = TWO_DEEP):
    trees, row, features = make_row(vlm, images, shape)
    logprobs = vlm.logprobs(row, features)
    (logprobs * row.weights).sum().backward()
    return trees, row, logprobs.detach(), gradients(vlm.model)


def plan_of(row: TreePack):
    return plan_levels(row.parents, torch.bincount(row.segment, minlength=len(row.parents)).tolist())


# ---- the update ----


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("name", "images", "shape"),
    [
        ("qwen3_5", (0,), TWO_DEEP),
        ("qwen3_5", (1,), TWO_DEEP),
        ("qwen3_5", (3,), TWO_DEEP),
        ("qwen3_5", (1, 0, 2), TWO_DEEP),
        ("qwen3_5", (1, 0), THREE_DEEP),
        ("qwen3_5_text", (0, 0), TWO_DEEP),
        ("qwen3_5_text", (0, 0), THREE_DEEP),
    ],
)
def test_logprobs_and_gradients_equal_unpacked(name: str, images: tuple[int, ...], shape: Sequence) -> None:
    vlm = make_vlm(name)
    trees, row, logprobs, ours = values_and_gradients(vlm, images, shape)
    plain = families.load_model(name)
    expected = unpacked(plain, vlm, trees)
    (expected * row.weights).sum().backward()
    theirs = gradients(plain)
    if max(images) > 0:
        assert any(n.startswith(vlm.family.vision_modules) for n in theirs), "the oracle's gradient reaches the tower"
    assert ours.keys() == theirs.keys() and any("A_log" in n for n in ours)
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-9, rtol=0)
    assert relative_error(ours, theirs) <= 1e-9


def test_rows_here_have_all_depths_and_padding_before_states_that_are_read() -> None:
    vlm = make_vlm("qwen3_5_text")
    for shape, depth in ((TWO_DEEP, 3), (THREE_DEEP, 4)):
        levels = plan_of(make_row(vlm, (0, 0), shape)[1]).levels
        assert len(levels) == depth
        assert any(batch.lengths is not None for level in levels[1:-1] for batch in level)


@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma3", "qwen3_vl"])
def test_levels_are_a_second_oracle_of_packed_rows(name: str) -> None:
    images = (1, 2) if name in families.IMAGE_FAMILIES else (0, 0)
    (*_, values, grads), (*_, packed, theirs) = (
        values_and_gradients(make_vlm(name, attention=backend), images, THREE_DEEP) for backend in ("levels", "sdpa")
    )
    torch.testing.assert_close(values, packed, atol=1e-9, rtol=0)
    assert relative_error(grads, theirs) <= 1e-6  # norms run in float32


@pytest.mark.usefixtures("in_float64")
def test_gradient_checkpointing_recomputes_from_the_same_states() -> None:
    grads, forwards = [], []
    for checkpointing in (False, True):
        vlm, calls = make_vlm("qwen3_5", gradient_checkpointing=checkpointing), []
        mlp = vlm.base.get_submodule("model.language_model.layers.0.mlp")
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        grads.append(values_and_gradients(vlm, (1, 0), TWO_DEEP)[-1])
        forwards.append(len(calls))
    assert relative_error(grads[1], grads[0]) <= 1e-12
    assert forwards[1] == 2 * forwards[0]


@pytest.mark.usefixtures("in_float64")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
def test_adapters_and_the_reference_see_padding_as_the_model_does() -> None:
    model = families.load_model("qwen3_5_text")
    lora = LoraConfig(r=2, target_modules=["in_proj_a", "in_proj_b", "in_proj_qkv"], init_lora_weights=False)
    vlm = VLM(get_peft_model(model, lora), families.load_processor("qwen3_5_text"), attention="levels")
    plain = copy.deepcopy(vlm.model).merge_and_unload()
    plain.set_attn_implementation("sdpa")
    trees, row, _ = make_row(vlm, (0, 0))
    with torch.no_grad():
        ours = vlm.logprobs(row, None)
        with vlm.as_reference():
            reference = vlm.logprobs(row, None)
        torch.testing.assert_close(ours, unpacked(plain, vlm, trees), atol=1e-9, rtol=0)
    torch.testing.assert_close(reference, unpacked(families.load_model("qwen3_5_text"), vlm, trees), atol=1e-9, rtol=0)
    assert (ours - reference).abs().max() > 0.1
    copied = make_vlm("qwen3_5_text")
    copied.keep_reference()
    with torch.no_grad(), copied.as_reference():
        torch.testing.assert_close(copied.logprobs(row, None), reference, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", LINEAR_FAMILIES)
def test_update_reads_each_prompt_token_once_and_each_branch_with_little_padding(name: str) -> None:
    vlm = make_vlm(name, torch.float32)
    read = []
    vlm.base.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    trees, row, features = make_row(vlm, (1, 0, 3) if name == "qwen3_5" else (0, 0, 0))
    assert not read
    vlm.logprobs(row, features)
    prompts = [len(tree[0].ids) for tree in trees]
    assert read[: len(trees)] == prompts
    below = len(row.input_ids) - sum(prompts)
    pairs = sum(int(n) == 1 for n in torch.bincount(row.segment))  # single tokens get one of padding
    assert below <= sum(read[len(trees) :]) <= below / 0.75 + pairs


# ---- the rollout ----


def make_prompts(vlm: VLM):
    questions = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
    counts = (1, 0, 3) if vlm.family.is_vision else (0, 0)
    return [make_prompt(vlm, n, seed, questions[seed]) for seed, n in enumerate(counts)]


@pytest.mark.parametrize(("name", "slots"), [("qwen3_5", 2), ("qwen3_5_text", 1), ("qwen3_5_text", 8)])
def test_greedy_tree_equals_generate(name: str, slots: int) -> None:
    vlm = make_vlm(name)
    prompts = make_prompts(vlm)
    trees = Engine(vlm, replace(CONFIG, rollout_lanes=slots)).rollout(prompts, vlm.encode(prompts), greedy)
    plain = families.load_model(name)
    for prompt, tree in zip(prompts, trees, strict=True):
        expected = families.greedy(plain, inputs_of(vlm, prompt), CONFIG.max_thought_length, vlm.forbidden.tolist())
        thought = tree.thoughts[0]
        inputs = families.extended(inputs_of(vlm, prompt), torch.cat([thought.ids, thought.bridge_ids]))
        answer = families.greedy(plain, inputs, CONFIG.max_answer_length, vlm.forbidden.tolist()).tolist()
        for thought in tree.thoughts:
            assert thought.ids.tolist() == expected.tolist()
            assert [a.ids.tolist() for a in thought.answers] == [answer] * CONFIG.num_answers


@pytest.mark.parametrize("name", LINEAR_FAMILIES)
def test_recorded_logprobs_equal_the_update_s_and_no_token_is_read_twice(name: str) -> None:
    vlm = make_vlm(name, torch.float32, temperature=0.7)
    read, encoded = [], []
    vlm.base.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    if vlm.family.is_vision:
        tower = vlm.base.get_submodule("model.visual")
        tower.register_forward_pre_hook(lambda module, args: encoded.append(len(args[0])))
    # one token ends: thoughts and answers of all lengths, in trees that make room for others
    config = replace(CONFIG, temperature=0.7, rollout_lanes=2, max_thought_length=12)
    vlm.eos_ids = frozenset(range(0, len(vlm.tokenizer), 8)) - set(vlm.forbidden.tolist())
    engine = Engine(vlm, config)
    prompts = make_prompts(vlm)
    features = vlm.encode(prompts)
    assert sum(encoded) == sum(len(p.pixels["pixel_values"]) for p in prompts if p.pixels)
    with torch.no_grad():
        trees = engine.rollout(prompts, features, sampler(config, torch.Generator().manual_seed(1)))
    thoughts = [t for tree in trees for t in tree.thoughts]
    fed = sum(len(t.ids) + len(t.bridge_ids) + sum(len(a.ids) - 1 for a in t.answers) for t in thoughts)
    assert sum(read) == sum(len(p.ids) for p in prompts) + fed
    assert len({len(t.ids) for t in thoughts}) > 2 and len({len(a.ids) for t in thoughts for a in t.answers}) > 2

    row = pack([tree_segments(tree) for tree in trees])
    with torch.no_grad():
        scored = vlm.logprobs(row, join_features(features))
    torch.testing.assert_close(scored, row.old_logprobs, atol=1e-4, rtol=0)
    if vlm.family.is_vision:
        assert sum(encoded) == sum(len(p.pixels["pixel_values"]) for p in prompts if p.pixels), "no image again"


@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma3"])
def test_rollout_in_batches_equals_that_in_blocks(name: str) -> None:
    grown = []
    for backend in ("levels", "sdpa"):
        vlm = make_vlm(name, attention=backend)
        prompts = make_prompts(vlm)
        draw = sampler(CONFIG, torch.Generator().manual_seed(2))
        trees = Engine(vlm, CONFIG).rollout(prompts, vlm.encode(prompts), draw)
        grown.append([[t.ids.tolist(), [a.ids.tolist() for a in t.answers]] for tree in trees for t in tree.thoughts])
    assert grown[0] == grown[1]


# ---- choice ----


def test_auto_picks_levels_for_linear_attention_and_says_why() -> None:
    config = ModelConfig(model=str(families.cached_folder("qwen3_5")))
    vlm = load_vlm(config, 1.0, torch.device("cpu"))
    assert vlm.attention == "levels"
    assert "auto, since the model has linear-attention layers" in attention_summary(vlm, config)
    vlm = load_vlm(replace(config, attention="levels", lora_r=2), 1.0, torch.device("cpu"))
    assert vlm.attention == "levels"
    cpu = Environment("cpu", torch.float32, causal=True, varlen=None, flex=True)
    assert choose_backend("levels", cpu) == ("levels", "as asked for")


@pytest.mark.parametrize("asked", ["sdpa", "flex", "flash"])
def test_other_backends_are_refused_for_linear_attention(asked) -> None:
    config = ModelConfig(model=str(families.cached_folder("qwen3_5_text")), attention=asked)
    with pytest.raises(UserError, match=rf"attention={asked}.*sibling to sibling.*attention=levels"):
        load_vlm(config, 1.0, torch.device("cpu"))
    with pytest.raises(UserError, match="sibling to sibling"):
        make_any("qwen3_5_text", torch.float32)


def test_linear_attention_of_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match="3 of its layers are linear attention, and 2 of them are gated delta nets"):
        hold_states_over_padding(families.load_model("qwen3_5_text"), 3)
