"""The backends of the tree attention: equal to a dense oracle, in plans alone and through whole models of all families.

The oracle knows only the rule, pair by pair: a token sees the earlier tokens of its own segment and all of its
ancestors'. Letters: N packed positions, H_q query heads, H_k key heads, D head size.
"""

import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import families
from support.exact import FAMILIES, gradients, make_prompt, make_vlm, random_tree, relative_error
from torch import Tensor, nn

from vlm_grpo.common.errors import UserError
from vlm_grpo.model import attention
from vlm_grpo.model.attention import reference_varlen, tree_flash, tree_flash_reference, tree_flex, tree_sdpa
from vlm_grpo.model.backend import Environment, choose_backend
from vlm_grpo.model.features import join_features
from vlm_grpo.model.load import ModelConfig, attention_summary, load_vlm
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.rollout.sampling import sampler
from vlm_grpo.tree.layout import TreeLayout, row_levels
from vlm_grpo.tree.pack import pack, tree_segments

HEADS, KEY_HEADS, SIZE = 4, 2, 12
MODULE = nn.Identity()  # backends look at nothing in it
CAUSAL = tuple(name for name in FAMILIES if name != "gemma3")


def random_row(seed: int, trees: int = 2) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents and lengths of a row, depth first, up to three levels below the roots; leaves may be empty."""
    generator = random.Random(seed)
    parents: list[int] = []
    lengths: list[int] = []

    def grow(parent: int, depth: int) -> None:
        segment, children = len(parents), generator.randint(1, 3) if depth < 3 else 0
        if depth == 2 and generator.random() < 0.5:
            children = 0
        parents.append(parent)
        lengths.append(generator.randint(1 if children else 0, 5))
        for _ in range(children):
            grow(segment, depth + 1)

    for _ in range(trees):
        grow(-1, 0)
    return tuple(parents), tuple(lengths)


def pairs(parents: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Segment and path index of every position, and who sees whom, one pair at a time."""
    segment = [s for s, length in enumerate(lengths) for _ in range(length)]
    branch = [[s] for s in range(len(parents))]  # a segment and its ancestors
    for s in range(len(parents)):
        while parents[branch[s][-1]] >= 0:
            branch[s].append(parents[branch[s][-1]])
    first = [sum(lengths[a] for a in branch[s][1:]) for s in range(len(parents))]
    path = [first[s] + i for s, length in enumerate(lengths) for i in range(length)]
    seen = [
        [segment[j] in branch[segment[i]] and path[j] <= path[i] for j in range(len(path))] for i in range(len(path))
    ]
    return torch.tensor(segment), torch.tensor(path), torch.tensor(seen)


def layout_and_mask(seed: int, window: int | None, images: bool = False) -> tuple[TreeLayout, Tensor]:
    parents, lengths = random_row(seed)
    segment, path, seen = pairs(parents, lengths)
    image = None
    if images:  # the second and third token of every root of at least three
        root = torch.tensor([parents[s] < 0 and lengths[s] >= 3 for s in segment])
        image = torch.where(root & (path >= 1) & (path <= 2), segment, torch.full_like(segment, -1))
        seen = seen | ((image[:, None] == image) & (image >= 0))
    if window is not None:
        seen = seen & (path[:, None] - path < window)
    return TreeLayout(parents, lengths, segment, path, image), seen


def random_qkv(length: int, seed: int, dtype: torch.dtype, requires_grad: bool, size: int = SIZE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    drawn = [torch.randn((1, h, length, size), generator=generator, dtype=torch.float64).to(dtype) for h in heads]
    return [x.requires_grad_(requires_grad) for x in drawn]


def oracle(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax over what each position sees, every head with its own copy of the keys, (1, N, H_q, D)."""
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("bhld,bhsd->bhls", query, key) * scale
    return torch.einsum("bhls,bhsd->blhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def results(attend, inputs: list[Tensor]) -> list[Tensor]:
    """Output and, for leaves that ask for them, the gradients of a random projection of it."""
    out = attend(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def test_levels_hold_every_position_once_and_rows_here_have_all_depths() -> None:
    rows = [random_row(seed) for seed in range(6)]
    levels = [row_levels(*row) for row in rows]
    for (_, lengths), of_row in zip(rows, levels, strict=True):
        queries = torch.cat([level.queries for level in of_row])
        assert sorted(queries.tolist()) == list(range(sum(lengths)))
    assert max(map(len, levels)) == 4 and any(0 in lengths for _, lengths in rows)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_backend_equals_the_dense_oracle_in_values_and_gradients(backend: str, seed: int, window: int | None) -> None:
    layout, seen = layout_and_mask(seed, window)
    inputs = random_qkv(len(seen), seed, torch.float64, requires_grad=True)
    options = {"scaling": 0.3, "tree": layout, "sliding_window": window}
    attend = {"sdpa": tree_sdpa, "flash": tree_flash_reference}[backend]
    ours = results(lambda q, k, v: attend(MODULE, q, k, v, seen[None, None], **options)[0], inputs)
    theirs = results(lambda q, k, v: oracle(q, k, v, seen, 0.3), inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_flex_equals_the_dense_oracle(seed: int, window: int | None, images: bool) -> None:
    layout, seen = layout_and_mask(seed, window, images)
    inputs = random_qkv(len(seen), seed, torch.float32, requires_grad=False)
    out, _ = tree_flex(MODULE, *inputs, torch.empty(1, 1, 0, 0), tree=layout, sliding_window=window)
    torch.testing.assert_close(out, oracle(*inputs, seen, SIZE**-0.5), atol=1e-5, rtol=1e-5)


def test_flex_mask_skips_blocks_that_hold_no_visible_pair() -> None:
    parents, lengths = (-1, 0, 0, -1), (128, 128, 128, 128)
    segment, path, _ = pairs(parents, lengths)
    mask = TreeLayout(parents, lengths, segment, path).block_mask(None)
    # block rows: the root sees itself, each child the root (wholly) and itself, the second tree itself
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]] and mask.full_kv_num_blocks.tolist() == [[[0, 1, 1, 0]]]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kernel", ["flash_attn", "torch"])
def test_kernels_are_called_in_their_own_conventions(kernel: str, window: int | None) -> None:
    """A stand-in that follows the kernel's documentation gives what the reference gives."""

    def by_the_book(q, k, v, starts_q, starts_k, longest_q, longest_k, scale, left, right):
        assert q.shape[-1] % 8 == 0 and starts_q.dtype == starts_k.dtype == torch.int32
        assert longest_q == starts_q.diff().max() and longest_k == starts_k.diff().max()
        outputs = []
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            rows, columns = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
            middle = rows + (k1 - k0) - (q1 - q0)
            seen = (columns <= middle + right) if right >= 0 else torch.ones_like(rows - columns, dtype=torch.bool)
            seen = seen & (columns >= middle - left) if left >= 0 else seen
            one = [x[None].transpose(1, 2) for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
            outputs.append(oracle(*one, seen, scale)[0])
        return torch.cat(outputs)

    def flash_attn(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
        left, right = window_size
        q, k, v = (torch.nn.functional.pad(x, (0, 4)) for x in (q, k, v))  # which this kernel does by itself
        return by_the_book(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, left, 0 if causal else right)[..., :SIZE]

    def torch_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert enable_gqa
        return by_the_book(q, k, v, cu_q, cu_k, max_q, max_k, scale, *window_size)

    level = row_levels((-1, 0, 0, -1), (4, 3, 2, 5))[1]
    q, k, v = (x[0].transpose(0, 1) for x in random_qkv(14, 0, torch.float64, requires_grad=False))
    of_level = q[level.queries], k[level.keys], v[level.keys], level, 0.2, window
    call = {
        "flash_attn": lambda *given: attention._flash_attn_varlen(flash_attn, *given),
        "torch": lambda *given: attention._torch_varlen(torch_varlen, *given),
    }[kernel]
    torch.testing.assert_close(call(*of_level), reference_varlen(*of_level), atol=1e-12, rtol=1e-12)


# ---- whole models ----


def packed(name: str, backend: str, dtype: torch.dtype = torch.float64, **options):
    """A model under a backend, and a row of two trees with their features."""
    vlm = make_vlm(name, dtype, attention=backend, **options)
    counts = (1, 2) if name in families.IMAGE_FAMILIES else (0, 0)
    prompts = [make_prompt(vlm, count, seed) for seed, count in enumerate(counts)]
    row = pack([random_tree(vlm, prompt, seed) for seed, prompt in enumerate(prompts)])
    with torch.no_grad():
        return vlm, row, join_features(vlm.encode(prompts))


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_logprobs_and_gradients_are_the_same_with_flash(name: str) -> None:
    values, grads = [], []
    for backend in ("sdpa", "flash_reference"):
        vlm, row, features = packed(name, backend)
        logprobs = vlm.logprobs(row, features)
        (logprobs * row.weights).sum().backward()
        values.append(logprobs)
        grads.append(gradients(vlm.model))
    torch.testing.assert_close(values[1], values[0], atol=1e-9, rtol=0)
    assert relative_error(grads[1], grads[0]) <= 1e-6  # norms run in float32


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm", "gemma3", "qwen2_sliding"])
def test_packed_logprobs_are_the_same_with_flex(name: str) -> None:
    values = []
    for backend in ("sdpa", "flex"):
        vlm, row, features = packed(name, backend, torch.float32)
        with torch.no_grad():
            values.append(vlm.logprobs(row, features))
    torch.testing.assert_close(values[1], values[0], atol=1e-4, rtol=0)


def test_gradient_checkpointing_recomputes_flash() -> None:
    grads = []
    for checkpointing in (False, True):
        vlm, row, features = packed("qwen2_5_vl", "flash_reference", gradient_checkpointing=checkpointing)
        (vlm.logprobs(row, features) * row.weights).sum().backward()
        grads.append(gradients(vlm.model))
    assert relative_error(grads[1], grads[0]) <= 1e-9


def test_rollout_decodes_as_flash_scores() -> None:
    vlm = make_vlm("qwen2_5_vl", torch.float32, attention="flash_reference")
    prompts = [make_prompt(vlm, 1), make_prompt(vlm, 2, 1)]
    features = vlm.encode(prompts)
    config = RolloutConfig(num_thoughts=2, num_answers=2, max_thought_length=5, max_answer_length=4)
    trees = Engine(vlm, config).rollout(prompts, features, sampler(config, torch.Generator().manual_seed(1)))
    row = pack([tree_segments(tree) for tree in trees])
    with torch.no_grad():
        logprobs = vlm.logprobs(row, join_features(features))
    torch.testing.assert_close(logprobs, row.old_logprobs, atol=1e-4, rtol=0)


# ---- refusals and choice ----


def test_flex_says_that_it_has_no_backward_on_a_cpu() -> None:
    vlm, row, features = packed("qwen2", "flex", torch.float32)
    with pytest.raises(UserError, match=r"attention=flex.*no backward.*attention=sdpa"):
        vlm.logprobs(row, features)


def test_flash_without_a_kernel_says_what_to_install() -> None:
    layout, seen = layout_and_mask(0, None)
    inputs = random_qkv(len(seen), 0, torch.float32, requires_grad=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_kernel", lambda: None)
        with pytest.raises(UserError, match=r"attention=flash.*vlm-grpo\[flash\]"):
            tree_flash(MODULE, *inputs, seen[None, None], tree=layout)


CPU = Environment("cpu", torch.float32, causal=True, varlen=None, flex=True)
GPU = Environment("cuda", torch.bfloat16, causal=True, varlen="flash-attn 2.8", flex=True)


@pytest.mark.parametrize(
    ("asked", "environment", "backend", "reason"),
    [
        ("auto", CPU, "sdpa", "auto on cpu"),
        ("sdpa", CPU, "sdpa", "as asked"),
        ("flex", CPU, "flex", "forward only on a CPU"),
        ("auto", GPU, "flash", "flash-attn 2.8"),
        ("flex", GPU, "flex", "as asked"),
        ("flash", GPU, "flash", "flash-attn 2.8"),
        ("auto", replace(GPU, varlen=None), "flex", "no variable-length kernel"),
        ("auto", replace(GPU, causal=False), "flex", "tokens of one image see each other"),
        ("auto", replace(GPU, dtype=torch.float32), "flex", "arithmetic is float32"),
        ("auto", replace(GPU, varlen=None, flex=False), "sdpa", "no flex"),
        ("auto", replace(GPU, device="mps", varlen=None, flex=False), "sdpa", "auto on mps"),
    ],
)
def test_backend_follows_device_family_and_what_is_installed(asked, environment, backend: str, reason: str) -> None:
    chosen, why = choose_backend(asked, environment)
    assert chosen == backend and reason in why


@pytest.mark.parametrize(
    ("asked", "environment", "message"),
    [
        ("flash", CPU, r"attention=flash.*NVIDIA GPU.*vlm-grpo\[flash\]"),
        ("flash", replace(GPU, varlen=None), r"attention=flash.*pip install"),
        ("flash", replace(GPU, causal=False), "attention=flash.*use attention=sdpa"),
        ("flash", replace(GPU, dtype=torch.float32), "attention=flash.*float32.*dtype=auto"),
        ("flex", replace(GPU, flex=False), "attention=flex.*triton"),
    ],
)
def test_backend_that_cannot_be_had_is_refused(asked, environment, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_backend(asked, environment)


def test_flash_is_refused_where_images_see_themselves() -> None:
    with pytest.raises(UserError, match=r"attention=flash.*use attention=sdpa"):
        make_vlm("gemma3", torch.float32, attention="flash_reference")


def test_option_reaches_the_model_and_the_greeting() -> None:
    cpu = torch.device("cpu")
    config = ModelConfig(attention="flex")
    vlm = load_vlm(config, 1.0, cpu)
    assert vlm.config.get_text_config()._attn_implementation == attention.IMPLEMENTATIONS["flex"]
    assert attention_summary(vlm, config).startswith("flex over packed rows (as asked for")
    assert load_vlm(ModelConfig(), 1.0, cpu).attention == "sdpa"
    with pytest.raises(UserError, match="attention=flash"):
        load_vlm(ModelConfig(attention="flash"), 1.0, cpu)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_gpu_backend_equals_the_dense_oracle(backend: str, window: int | None) -> None:
    """Within bfloat16, whose step is 2^-8. CPU twins: the tests against the dense oracle above."""
    layout, seen = layout_and_mask(1, window)
    layout = replace(layout, segment=layout.segment.cuda(), path=layout.path.cuda())
    exact = random_qkv(len(seen), 1, torch.bfloat16, requires_grad=False, size=16)  # the least that flex takes
    theirs = results(lambda q, k, v: oracle(q, k, v, seen, 0.3), [x.double().requires_grad_() for x in exact])
    attend = {"flash": tree_flash, "flex": tree_flex}[backend]
    options = {"scaling": 0.3, "tree": layout, "sliding_window": window}
    nothing = torch.empty(1, 1, 0, 0, device="cuda")
    ours = results(
        lambda q, k, v: attend(MODULE, q, k, v, nothing, **options)[0], [x.cuda().requires_grad_() for x in exact]
    )
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, atol=3e-2, rtol=3e-2)


def test_gpu_bench_runs_to_its_end_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "bench" / "gpu.py"
    spec = importlib.util.spec_from_file_location("bench_gpu", path)
    assert spec and spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.main(["--tiny"])
    out = capsys.readouterr().out
    assert "flash_reference" in out and "unpacked" in out and "differs" not in out
