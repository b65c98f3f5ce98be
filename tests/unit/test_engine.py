"""The rollout: greedy equals `generate`, what is recorded equals the packed pass, and nothing is computed twice."""

from dataclasses import replace

import pytest
import torch
from support import families
from support.exact import FAMILIES, inputs_of, make_prompt, make_vlm

from vlm_grpo.model.features import join_features
from vlm_grpo.rollout.cache import TreeCache
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.sampling import greedy, sampler, tree_sampler
from vlm_grpo.tree.pack import pack, tree_segments
from vlm_grpo.tree.tags import ANSWER_CLOSE, THOUGHT_CLOSE, TagMatcher

CONFIG = RolloutConfig(num_thoughts=3, num_answers=2, max_thought_length=9, max_answer_length=6)


def images_of(name: str) -> tuple[int, ...]:
    return (1, 0, 3) if name in families.IMAGE_FAMILIES else (0, 0)


def make_prompts(vlm, name: str):
    questions = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
    return [make_prompt(vlm, n, seed, questions[seed]) for seed, n in enumerate(images_of(name))]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tree_equals_generate(name: str) -> None:
    vlm = make_vlm(name)
    prompts = make_prompts(vlm, name)
    trees = Engine(vlm, CONFIG).rollout(prompts, vlm.encode(prompts), greedy)
    plain = families.load_model(name)
    for prompt, tree in zip(prompts, trees, strict=True):
        expected = families.greedy(plain, inputs_of(vlm, prompt), CONFIG.max_thought_length, vlm.forbidden.tolist())
        assert [t.ids.tolist() for t in tree.thoughts] == [expected.tolist()] * CONFIG.num_thoughts
        thought = tree.thoughts[0]
        inputs = families.extended(inputs_of(vlm, prompt), torch.cat([thought.ids, thought.bridge_ids]))
        expected = families.greedy(plain, inputs, CONFIG.max_answer_length, vlm.forbidden.tolist())
        for thought in tree.thoughts:
            assert [a.ids.tolist() for a in thought.answers] == [expected.tolist()] * CONFIG.num_answers


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_logprobs_equal_the_packed_pass(name: str) -> None:
    vlm = make_vlm(name, torch.float32, temperature=0.7)
    config = replace(CONFIG, temperature=0.7, rollout_lanes=2)
    prompts = make_prompts(vlm, name)
    features = vlm.encode(prompts)
    with torch.no_grad():
        trees = Engine(vlm, config).rollout(prompts, features, sampler(config, torch.Generator().manual_seed(1)))
    lengths = {len(t.ids) for tree in trees for t in tree.thoughts}
    row = pack([tree_segments(tree) for tree in trees])
    with torch.no_grad():
        packed = vlm.logprobs(row, join_features(features))
    assert len(lengths) > 0 and len(packed) == sum(tree.num_sampled for tree in trees)
    torch.testing.assert_close(packed, row.old_logprobs, atol=1e-4, rtol=0)
    sampled = torch.cat([x.ids for tree in trees for t in tree.thoughts for x in (t, *t.answers)])
    assert not torch.isin(sampled, vlm.forbidden).any()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm", "llama"])
def test_every_prompt_token_is_read_once_and_every_image_encoded_once(name: str) -> None:
    vlm = make_vlm(name, torch.float32)
    prompts = make_prompts(vlm, name)
    read, encoded = [], []

    def count_pixels(module, args, kwargs):
        encoded.append(len(args[0] if args else kwargs["pixel_values"]))

    embeddings = vlm.base.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    towers = [vlm.base.get_submodule(n.rstrip(".")) for n in vlm.family.vision_modules[:1]]
    for tower in towers:
        tower.register_forward_pre_hook(count_pixels, with_kwargs=True)
    config = replace(CONFIG, ignore_eos=True)
    features = vlm.encode(prompts)
    shapes = [
        p.pixels["pixel_values"].shape for p in prompts if p.pixels
    ]  # (patches, values), SmolVLM (1, tiles, C, H, W)
    assert sum(encoded) == sum(s[0] * s[1] if len(s) == 5 else s[0] for s in shapes) and not read
    before = list(encoded)
    engine = Engine(vlm, config)
    trees = engine.rollout(prompts, features, sampler(config, torch.Generator().manual_seed(1)))
    assert encoded == before, "the rollout encodes no image again"
    assert read[: len(prompts)] == [len(p.ids) for p in prompts]
    bridge = len(trees[0].thoughts[0].bridge_ids)
    # Equal lengths leave no padding in the block: each thought token once, each answer token but the last once
    branches = len(prompts) * config.num_thoughts
    fed = branches * (config.max_thought_length + bridge + config.num_answers * (config.max_answer_length - 1))
    assert sum(read[len(prompts) :]) == fed
    # The longest path decides the number of blocks: the bridge costs none
    assert len(read) - len(prompts) == config.max_thought_length + config.max_answer_length - 1


def test_a_tree_never_needs_more_slots_than_its_tokens() -> None:
    vlm = make_vlm("qwen2_5_vl", torch.float32)
    prompt = make_prompt(vlm, 1)
    config = replace(CONFIG, ignore_eos=True)
    engine = Engine(vlm, config)
    shapes = []
    original = TreeCache.update

    def watch(self, keys, values, layer, *args, **kwargs):
        out = original(self, keys, values, layer, *args, **kwargs)
        shapes.append(out[0].shape[2])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeCache, "update", watch)
        tree = engine.rollout([prompt], vlm.encode([prompt]), greedy)[0]
    k, m = config.num_thoughts, config.num_answers
    tokens = len(prompt.ids) + k * (config.max_thought_length + len(tree.thoughts[0].bridge_ids))
    tokens += k * m * config.max_answer_length
    assert max(shapes) == tokens - k * m <= engine.growth.slots(len(prompt.ids))  # an answer's last token is never fed


def test_with_ignore_eos_a_thought_goes_on_after_its_tag() -> None:
    vlm = make_vlm("gpt2", torch.float32)
    config = replace(CONFIG, ignore_eos=True)
    tag = vlm.tokenizer.encode(THOUGHT_CLOSE, add_special_tokens=False)
    said = iter(tag + tag[:1] * 20)
    [tree] = Engine(vlm, config).rollout(
        [make_prompt(vlm, 0)], [None], lambda logprobs, trees: torch.full((len(logprobs),), next(said))
    )
    assert len(tag) < config.max_thought_length
    for thought in tree.thoughts:
        assert len(thought.ids) == config.max_thought_length and thought.closed
        assert [len(a.ids) for a in thought.answers] == [config.max_answer_length] * config.num_answers


@pytest.mark.slow
def test_batch_slots_do_not_change_greedy_trees() -> None:
    vlm = make_vlm("qwen3_vl")
    prompts = make_prompts(vlm, "qwen3_vl")
    features = vlm.encode(prompts)
    texts = []
    for slots in (1, 2, 8):
        trees = Engine(vlm, replace(CONFIG, rollout_lanes=slots)).rollout(prompts, features, greedy)
        texts.append([[t.ids.tolist(), [a.ids.tolist() for a in t.answers]] for tree in trees for t in tree.thoughts])
    assert texts[0] == texts[1] == texts[2]


def test_same_seed_same_rollout_and_other_seed_another() -> None:
    vlm = make_vlm("gpt2", torch.float32)
    prompts = make_prompts(vlm, "gpt2")

    def ids(seed: int):
        draw = sampler(CONFIG, torch.Generator().manual_seed(seed))
        trees = Engine(vlm, CONFIG).rollout(prompts, [None, None], draw)
        return [a.ids.tolist() for tree in trees for t in tree.thoughts for a in t.answers]

    assert ids(3) == ids(3) != ids(4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "levels"])
def test_a_tree_with_its_own_generator_does_not_depend_on_its_neighbours(attention: str) -> None:
    vlm = make_vlm("qwen2_5_vl", attention=attention)
    prompts = make_prompts(vlm, "qwen2_5_vl")
    features = vlm.encode(prompts)

    def ids(chosen: list[int], slots: int) -> dict[int, list[list[int]]]:
        draw = tree_sampler(CONFIG, [torch.Generator().manual_seed(seed) for seed in chosen])
        engine = Engine(vlm, replace(CONFIG, rollout_lanes=slots))
        trees = engine.rollout([prompts[i] for i in chosen], [features[i] for i in chosen], draw)
        return {
            i: [x.ids.tolist() for t in tree.thoughts for x in (t, *t.answers)]
            for i, tree in zip(chosen, trees, strict=True)
        }

    together = ids([0, 1, 2], 8)
    assert len({str(tree) for tree in together.values()}) == 3
    assert together == ids([2, 0, 1], 2) == ids([1, 2, 0], 1)
    assert together == ids([0], 1) | ids([2, 1], 2)


@pytest.mark.parametrize(
    "pieces", [["</think>"], ["</", "think", ">"], ["a</thi", "nk>b"], ["<", "<", "/", "think", ">\n"]]
)
def test_tag_is_found_however_tokens_cut_it(pieces: list[str]) -> None:
    matcher = TagMatcher(THOUGHT_CLOSE, pieces)
    state = 0
    for token in range(len(pieces)):
        assert state < matcher.found, "found before the tag was whole"
        state = matcher.table[state][token]
    assert state == matcher.found


def test_tag_table_equals_searching_the_text() -> None:
    pieces = ["</", "<", "/", "answer", ">", "an", "swer", "ans", "wer>", "</answer", "x", "</a", "nswer>y", ""]
    matcher = TagMatcher(ANSWER_CLOSE, pieces)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        state, text = 0, ""
        for token in torch.randint(len(pieces), (12,), generator=generator).tolist():
            text += pieces[token]
            state = matcher.table[state][token]
            assert (state == matcher.found) == (ANSWER_CLOSE in text)
            if state == matcher.found:
                break


@pytest.mark.slow
def test_sampler_follows_the_distribution_and_its_truncations() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logprobs = probabilities.log().expand(40_000, -1)

    def shares(**options) -> torch.Tensor:
        draw = sampler(replace(CONFIG, **options), torch.Generator().manual_seed(0))
        return torch.bincount(draw(logprobs, [0] * len(logprobs)), minlength=4) / len(logprobs)

    # Standard error of a share at n = 40,000 is at most 0.0025
    tolerance = {"atol": 0.01, "rtol": 0}
    torch.testing.assert_close(shares(), probabilities, **tolerance)
    torch.testing.assert_close(shares(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), **tolerance)
    torch.testing.assert_close(shares(top_p=0.75), torch.tensor([0.625, 0.375, 0, 0]), **tolerance)
    torch.testing.assert_close(shares(min_p=0.25), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95, **tolerance)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "gpt2"])
def test_bfloat16_arithmetic_keeps_rollout_and_update_together(name: str) -> None:
    vlm = make_vlm(name, torch.float32, autocast=torch.bfloat16)
    prompts = make_prompts(vlm, name)
    features = vlm.encode(prompts)
    trees = Engine(vlm, CONFIG).rollout(prompts, features, sampler(CONFIG, torch.Generator().manual_seed(1)))
    row = pack([tree_segments(tree) for tree in trees])
    packed = vlm.logprobs(row, join_features(features))
    assert packed.dtype == torch.float32
    # bfloat16 keeps 8 bits; these models' logits are of the order of 10, so a log-probability may move by some tenths
    assert (packed - row.old_logprobs).abs().max() < 1.0
    assert (packed - row.old_logprobs).abs().mean() < 0.1
