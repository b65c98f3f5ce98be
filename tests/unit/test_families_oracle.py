"""The oracle's own tests: against forwards of growing prefixes, against `generate`, and for blindness."""

import functools
import math

import pytest
import torch
from support.families import (
    BUILDERS,
    IMAGE_FAMILIES,
    LINEAR_FAMILIES,
    TEXT_FAMILIES,
    build,
    extended,
    greedy,
    load_model,
    load_processor,
    noise_images,
    prompt_inputs,
    unpacked_distributions,
    unpacked_logprobs,
)

FAMILIES = IMAGE_FAMILIES + TEXT_FAMILIES
shared_model = functools.cache(load_model)  # for the tests that leave it as it is
RESPONSE = torch.tensor([40, 9, 60, 41, 70, 71, 40, 40, 52, 63, 80, 33])  # longer than the sliding window


def richest_prompt(name: str) -> dict[str, torch.Tensor]:
    return prompt_inputs(name, noise_images(3 if name in IMAGE_FAMILIES else 0))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_oracle_equals_one_forward_per_token(name):
    model, inputs = shared_model(name), richest_prompt(name)
    expected = [
        model(**extended(inputs, RESPONSE[:step]), use_cache=False).logits[0, -1].log_softmax(-1)[token]
        for step, token in enumerate(RESPONSE)
    ]
    # float64 rounding of sums in another order; RMSNorm's float32 statistics are per token and the same on both sides
    torch.testing.assert_close(unpacked_logprobs(model, inputs, RESPONSE), torch.stack(expected), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_generate_takes_the_oracles_most_likely_tokens(name):
    model, inputs = shared_model(name), richest_prompt(name)
    forbidden = load_processor(name)("box")["input_ids"] if name in TEXT_FAMILIES else [model.config.image_token_id]
    ids = greedy(model, inputs, max_new_tokens=10, forbidden_ids=forbidden)
    assert unpacked_distributions(model, inputs, ids, forbidden_ids=forbidden).argmax(dim=-1).tolist() == ids.tolist()


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", IMAGE_FAMILIES)
@torch.no_grad()
def test_processor_and_model_agree_on_the_number_of_image_tokens(name, count):
    model, inputs = shared_model(name), prompt_inputs(name, noise_images(count))
    placeholders = int((inputs["input_ids"] == model.config.image_token_id).sum())
    if count == 0:
        assert placeholders == 0 and "pixel_values" not in inputs
        return
    text = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    features = model.get_image_features(**{key: value for key, value in inputs.items() if key not in text})
    features = features.pooler_output
    assert placeholders == sum(math.prod(feature.shape[:-1]) for feature in features) >= 4 * count


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_every_image_and_its_place_change_the_logprobs(name):
    model, images = shared_model(name), noise_images(3)
    base = unpacked_logprobs(model, prompt_inputs(name, images), RESPONSE)
    swapped = unpacked_logprobs(model, prompt_inputs(name, [*images[:-2], images[-1], images[-2]]), RESPONSE)
    assert (base - swapped).abs().max() > 1e-3
    for index, other in enumerate(noise_images(3, seed=1)):
        changed = unpacked_logprobs(
            model, prompt_inputs(name, [*images[:index], other, *images[index + 1 :]]), RESPONSE
        )
        assert (base - changed).abs().max() > 1e-3  # a thousand times the tolerance of the engine's tests


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_every_parameter(name):
    model, inputs = load_model(name), richest_prompt(name)
    unpacked_logprobs(model, inputs, RESPONSE).sum().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()}
    expected = set()
    if name == "llava_onevision":  # its features are taken before this layer
        expected = {f"model.vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias")}
    assert without == expected


@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma3"])
@torch.no_grad()
def test_sliding_window_matters(name):
    model, inputs = shared_model(name), richest_prompt(name)
    longer = extended(inputs, RESPONSE)
    length = longer["input_ids"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    wide = model(**longer | {"attention_mask": causal}, use_cache=False).logits[0].log_softmax(-1)[-2, RESPONSE[-1]]
    assert (unpacked_logprobs(model, inputs, RESPONSE)[-1] - wide).abs() > 0.01


@torch.no_grad()
def test_gemma3_image_tokens_see_each_other():
    model, inputs = shared_model("gemma3"), richest_prompt("gemma3")
    causal = {key: value for key, value in inputs.items() if key != "token_type_ids"}
    difference = unpacked_logprobs(model, inputs, RESPONSE) - unpacked_logprobs(model, causal, RESPONSE)
    assert difference.abs().max() > 1e-3


@torch.no_grad()
def test_temperature_and_forbidden_ids_follow_the_formula():
    model, inputs = shared_model("gpt2"), richest_prompt("gpt2")
    plain = unpacked_distributions(model, inputs, RESPONSE)
    got = unpacked_distributions(model, inputs, RESPONSE, temperature=2.0, forbidden_ids=[7, 290])
    weights = plain.exp().sqrt()  # p^(1/2), renormalised over the ids that are left
    weights[:, [7, 290]] = 0
    torch.testing.assert_close(got.exp(), weights / weights.sum(-1, keepdim=True), atol=1e-12, rtol=0)


def test_builds_are_the_same_each_time(tmp_path):
    first, second = (build("smolvlm", tmp_path / part) for part in ("first", "second"))
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)


def test_linear_families_hold_linear_attention():
    assert set(BUILDERS) == {*FAMILIES, *LINEAR_FAMILIES}
    for name in LINEAR_FAMILIES:
        assert "linear_attention" in shared_model(name).config.get_text_config().layer_types
