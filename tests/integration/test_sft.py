"""The supervised warm start: its loss is transformers' own, its tokens are those the engine continues; it learns."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from support import families
from support.exact import gradients, inputs_of, relative_error
from support.forks import Forks, forks
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.coordinates import answer_in_model, answer_in_original
from vlm_grpo.model.features import join_features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.engine import Engine
from vlm_grpo.rollout.growth import RolloutConfig
from vlm_grpo.sft import reference_tree, sft_backward
from vlm_grpo.task import Reward, Sample, TaskAdapter
from vlm_grpo.tree.pack import Segment, pack
from vlm_grpo.tree.types import Prompt, RolloutTree


class Boxes(TaskAdapter):
    """References with thoughts of different lengths and boxes in pixels of the original image."""

    coordinates: ClassVar[bool] = True
    answers: ClassVar[dict[str, str]] = {"s0": "[10, 20, 30, 38]", "s1": "none", "s2": "[3, 4, 5, 60]; [1, 2, 20, 30]"}
    thoughts: ClassVar[dict[str, str]] = {"s0": "the red box", "s1": "", "s2": "there are two: one at [3, 4, 5, 60]"}

    def samples(self, split: str) -> Sequence[Sample]:
        counts = (1, 0, 1) if split == "images" else (0, 0, 0)
        return [Sample(f"s{i}", families.noise_images(n, i), f"Question {i}?", None) for i, n in enumerate(counts)]

    def reward(self, sample: Sample, answer: str) -> Reward:
        return Reward(float(answer == self.answers[sample.id]))

    def reference_answer(self, sample: Sample) -> str:
        return self.answers[sample.id]

    def reference_thought(self, sample: Sample) -> str:
        return self.thoughts[sample.id]


def make_vlm(name: str) -> VLM:
    return VLM(families.load_model(name), families.load_processor(name))


def make_prompts(vlm: VLM) -> list[Prompt]:
    samples = Boxes().samples("images" if vlm.family.is_vision else "texts")
    return [vlm.prompts.build(sample, coordinates=True) for sample in samples]


def make_trees(vlm: VLM) -> list[list[Segment]]:
    return [reference_tree(vlm, Boxes(), prompt) for prompt in make_prompts(vlm)]


def num_scored(trees: Sequence[Sequence[Segment]]) -> int:
    return sum(segment.num_scored for tree in trees for segment in tree)


@pytest.mark.parametrize(("name", "row"), [("gpt2", 4096), ("qwen2_5_vl", 4096), ("qwen2_5_vl", 1), ("gemma3", 4096)])
def test_loss_and_gradient_are_those_of_transformers_labels(name: str, row: int) -> None:
    """Each sample by itself through `model(..., labels=...)`, which means over its labelled tokens."""
    vlm = make_vlm(name)
    prompts, trees = make_prompts(vlm), make_trees(vlm)
    total = num_scored(trees)
    loss = sft_backward(vlm, trees, total, row, tower_trains=True)

    # labels forbid no id: give the plain model's forbidden logits no weight in its softmax
    plain = families.load_model(name)
    head = plain.get_output_embeddings()
    head.register_forward_hook(lambda module, args, out: out.index_fill(-1, vlm.forbidden, -1e9))
    expected = torch.zeros((), dtype=torch.float64)
    for prompt, tree in zip(prompts, trees, strict=True):
        [_, thought, answer] = tree
        response = torch.cat([thought.ids, answer.ids])
        labels = torch.full((1, len(prompt.ids) + len(response)), -100)
        start = len(prompt.ids)
        labels[0, start : start + thought.num_scored] = thought.ids[: thought.num_scored]
        labels[0, start + len(thought.ids) :] = answer.ids
        inputs = families.extended(inputs_of(vlm, prompt), response)
        mean = plain(**inputs, labels=labels).loss
        expected = expected + mean * int((labels != -100).sum()) / total
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    # transformers computes its loss in float32
    assert relative_error(gradients(vlm.model), gradients(plain)) < 1e-5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llama"])
def test_references_are_what_the_engine_would_have_grown(name: str) -> None:
    """Sampling exactly the reference's ids gives a closed thought, the same bridge and the reference's words."""
    vlm, task = make_vlm(name), Boxes()
    config = RolloutConfig(num_thoughts=1, num_answers=1, max_thought_length=200, max_answer_length=200)
    engine = Engine(vlm, config)
    for prompt in make_prompts(vlm):
        [root, thought, answer] = reference_tree(vlm, task, prompt)
        scored = thought.num_scored
        assert torch.equal(root.ids, prompt.ids) and answer.num_scored == len(answer.ids)
        assert int(answer.ids[-1]) == vlm.tokenizer.eos_token_id and int(answer.ids[-1]) in vlm.eos_ids
        queue = iter([*thought.ids[:scored].tolist(), *answer.ids.tolist()])
        [tree] = engine.rollout([prompt], vlm.encode([prompt]), lambda *_, queue=queue: torch.tensor([next(queue)]))
        [grown] = tree.thoughts
        [said] = grown.answers
        assert grown.closed and torch.equal(torch.cat([grown.ids, grown.bridge_ids]), thought.ids)
        assert said.closed and torch.equal(said.ids, answer.ids[:-1])  # its closing tag ends it before the EOS
        assert list(queue) == [vlm.tokenizer.eos_token_id]
        words = task.thoughts[prompt.sample.id], task.answers[prompt.sample.id]
        if prompt.original_sizes:
            words = tuple(answer_in_model(prompt, text) for text in words)
            size = prompt.original_sizes[0]
            there, back = (parse_numbers(text) for text in (task.answers[prompt.sample.id], answer_back(tree)))
            # the model's coordinates are integers of the resized image or thousandths: a pixel and a half at most
            assert max(abs(x - y) for x, y in zip(there, back, strict=True)) <= max(1.5, max(size) / 1000)
        assert (grown.text, said.text) == words


def answer_back(tree: RolloutTree) -> str:
    return answer_in_original(tree.prompt, tree.thoughts[0].answers[0].text)


def parse_numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def test_whole_text_reads_as_the_format_asks() -> None:
    vlm = make_vlm("qwen2_5_vl")
    tree = make_trees(vlm)[1]
    text = vlm.tokenizer.decode(torch.cat([segment.ids for segment in tree]))
    assert text.endswith("<think></think>\n<answer>none</answer><|im_end|>")


def test_gradient_is_the_same_for_every_row_size_and_share_of_the_batch() -> None:
    """Shares as two processes would take them, 2 samples and 1, each with the batch's own number of tokens."""
    found = []
    for shares, row in (([[0, 1, 2]], 4096), ([[0, 1, 2]], 200), ([[0, 2], [1]], 4096)):
        vlm = make_vlm("qwen2_5_vl")
        trees = make_trees(vlm)
        losses = [
            sft_backward(vlm, [trees[i] for i in share], num_scored(trees), row, tower_trains=True) for share in shares
        ]
        found.append((sum(losses), gradients(vlm.model)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        assert relative_error(gradient, found[0][1]) < 1e-12


def test_a_frozen_tower_gets_no_gradient() -> None:
    vlm = make_vlm("qwen2_5_vl")
    for name, weight in vlm.model.named_parameters():
        weight.requires_grad_(not name.startswith("model.visual."))
    prompts, trees = make_prompts(vlm), make_trees(vlm)
    sft_backward(vlm, trees, num_scored(trees), 4096, vlm.tower_trains)
    assert not vlm.tower_trains
    row = pack(trees)
    expected = -vlm.logprobs(row, join_features(vlm.encode(prompts))).sum() / num_scored(trees)
    weights = {n: p for n, p in vlm.model.named_parameters() if p.requires_grad}
    gradient = dict(zip(weights, torch.autograd.grad(expected, list(weights.values())), strict=True))
    assert relative_error(gradients(vlm.model), gradient) < 1e-12


def test_a_reference_that_is_no_text_is_named() -> None:
    class Wrong(Boxes):
        def reference_answer(self, sample: Sample) -> str:
            return None  # type: ignore[return-value]

    vlm = make_vlm("gpt2")
    with pytest.raises(UserError, match=r"sample 's0'.*must be text"):
        reference_tree(vlm, Wrong(), make_prompts(vlm)[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("warm-starts")) as started:
        yield started


OPTIONS = {
    **{"task": "refcoco", "task_args": "{data: scenes, limit: 12}", "train_split": "sft", "batch_size": 5},
    **{"max_steps": 6, "learning_rate": 0.003, "eval_samples": 3, "max_thought_length": 8, "max_answer_length": 8},
}


@pytest.fixture(scope="module")
def warm(server: Forks) -> Path:
    assert server.run("sft", "warm", OPTIONS | {"output_dir": "warm"}) == [0], server.log("warm")
    return server.folder / "warm"


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_loss_falls_and_the_held_out_split_is_evaluated(server: Forks, warm: Path) -> None:
    losses = [row["loss"] for row in rows(warm) if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert rows(warm)[-1]["eval/num_samples"] == 3
    assert "acc@0.5" in server.log("warm")


def test_saved_model_loads_plainly(warm: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(warm, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(warm)
    assert processor.tokenizer.eos_token_id in (507, *model.generation_config.eos_token_id)
    saved = load_file(warm / "model.safetensors")
    for name, weight in model.state_dict().items():
        if name in saved:
            assert torch.equal(weight, saved[name])
    image = families.noise_images(1)
    content = [{"type": "image"}, {"type": "text", "text": "Locate: the red circle"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert model.generate(**processor(text=[text], images=image, return_tensors="pt"), max_new_tokens=2).shape[0] == 1


def test_two_processes_warm_start_like_one(server: Forks, warm: Path) -> None:
    """Unequal shares of 3 and 2 samples. float32: other sums, and AdamW magnifies what is near 0."""
    assert server.run("sft", "two", OPTIONS | {"output_dir": "two"}, processes=2) == [0, 0], server.log("two")
    for one, two in zip(rows(warm), rows(server.folder / "two"), strict=True):
        assert set(one) == set(two)
        if "loss" in one:
            assert two["num_tokens"] == one["num_tokens"]
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    first_one, first_two = rows(warm)[0], rows(server.folder / "two")[0]
    assert first_two["loss"] == pytest.approx(first_one["loss"], rel=1e-6)
    assert first_two["grad_norm"] == pytest.approx(first_one["grad_norm"], rel=1e-4)


def test_a_split_that_is_not_there_is_said_before_the_first_step(server: Forks) -> None:
    assert server.run("sft", "no-split", OPTIONS | {"output_dir": "no-split", "eval_split": "vall"}) == [2]
    assert "no split 'vall'" in server.log("no-split")
    assert not (server.folder / "no-split").exists()
