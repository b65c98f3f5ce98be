"""The packed pass equals the unpacked model, for every family: log-probabilities and all gradients, in float64."""

import pytest
import torch
from support import families
from support.exact import gradients, make_prompt, make_vlm, random_tree, relative_error, unpacked
from torch import Tensor

from vlm_grpo.model.features import Features, join_features
from vlm_grpo.tree.pack import pack


def with_leaves(features: Features | None) -> tuple[Features | None, list[Tensor]]:
    leaves = [] if features is None else [t.detach().requires_grad_() for t in features.tensors]
    return (None if features is None else features.replaced(leaves)), leaves


CASES = [(name, images) for name in families.IMAGE_FAMILIES for images in ((1,), (3,), (0,), (1, 0, 2))]


CASES += [(name, images) for name in families.TEXT_FAMILIES for images in ((0,), (0, 0))]


@pytest.mark.parametrize(("name", "images"), CASES)
def test_packed_logprobs_and_gradients_equal_unpacked(name: str, images: tuple[int, ...]) -> None:
    vlm = make_vlm(name)
    prompts = [make_prompt(vlm, count, seed) for seed, count in enumerate(images)]
    trees = [random_tree(vlm, prompt, seed) for seed, prompt in enumerate(prompts)]
    row = pack(trees)

    encoded = vlm.encode(prompts)
    detached, leaves = with_leaves(join_features(encoded))
    packed = vlm.logprobs(row, detached)
    (packed * row.weights).sum().backward()
    towers = [t for f in encoded if f is not None for t in f.pooled]
    towers += [
        t for level in zip(*(f.deepstack for f in encoded if f is not None), strict=True) for im in level for t in im
    ]
    if leaves:
        torch.autograd.backward(towers, [leaf.grad for leaf in leaves])
    ours = gradients(vlm.model)

    plain = families.load_model(name)
    expected = unpacked(plain, vlm, trees)
    (expected * row.weights).sum().backward()
    theirs = gradients(plain)
    if max(images) > 0:
        assert any(n.startswith(vlm.family.vision_modules) for n in theirs), "the oracle's gradient reaches the tower"
    torch.testing.assert_close(packed, expected, atol=1e-6, rtol=0)
    assert relative_error(ours, theirs) <= 1e-6
