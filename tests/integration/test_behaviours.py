"""Failures that users of such trainers have met in public, and what ours does instead; small, on the CPU.

Those that other files test:

- boxes of the wrong scale: test_coordinates; valid boxes that score 0: test_scoring, test_refcoco
- wrong positions under packing: test_exact, test_packed_logprobs_and_gradients_equal_unpacked
- log-ratios of any size: test_loss, test_log_ratios_of_any_size_stay_finite_in_float32
- bad and long samples: test_bad_input, test_a_bad_image_is_skipped_counted_and_named_if_asked_for and
  test_a_question_too_long_is_named_or_skipped_but_never_cut
- a resumed run that repeats or skips prompts: test_resume, test_killed_run_ends_as_the_whole_one
- half-written checkpoints: test_checkpoint, test_kill_at_any_point_of_a_save_leaves_whole_checkpoints
- pickles that run code: test_data_refcoco, test_a_pickle_that_asks_for_code_is_refused_unread
- an unknown option that is ignored: test_config, test_misspelt_option_names_the_nearest_and_where_it_may_stand
- a data set half downloaded: test_data_refcoco, test_missing_and_corrupt_images_are_named_and_nothing_is_written
"""

import ast
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from support import families
from support.two_ranks import CONFIG, Mixed, difference, graded_trees, gradient, make_trainer
from torch import Tensor, nn

from vlm_grpo.algorithm.advantage import group_advantages
from vlm_grpo.algorithm.trainer import Graded, StepConfig
from vlm_grpo.common.errors import UserError
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model import head as head_module
from vlm_grpo.model.coordinates import CoordinateSpace
from vlm_grpo.model.features import join_features
from vlm_grpo.model.load import ModelConfig, load_vlm
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.rewards import RewardWorkers, score_trees
from vlm_grpo.rollout.worker import RewardWorker
from vlm_grpo.task import Reward, Sample, TaskAdapter, find_task
from vlm_grpo.tree.pack import pack, tree_segments, with_weights
from vlm_grpo.tree.types import Answer, RolloutTree, Thought

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Groups of different sizes that divide nothing
ODD = StepConfig(num_thoughts=3, num_answers=5, max_thought_length=4, max_answer_length=3)


def make_vlm(name: str = "qwen2_5_vl", dtype: torch.dtype = torch.float64, **options) -> VLM:
    return VLM(families.load_model(name, dtype), families.load_processor(name), **options)


def make_samples(*images: int) -> list[Sample]:
    return [Sample(f"s{i}", families.noise_images(n, i), "Where is the red box?", None) for i, n in enumerate(images)]


@pytest.fixture(scope="module")
def tiny() -> VLM:
    """The shipped model, for tests that leave its weights as they are."""
    return load_vlm(ModelConfig(), 1.0, CPU)


def fresh_tiny(**options) -> VLM:
    return load_vlm(ModelConfig(**options), 1.0, CPU)


# ---- boxes of the wrong scale: converted once, both kept ----


class Boxes(Mixed):
    coordinates = True


@pytest.mark.parametrize(("name", "answer"), [("qwen2_5_vl", "[56, 0, 112, 28]"), ("qwen3_vl", "[500, 0, 1000, 500]")])
def test_the_scored_answer_is_in_original_pixels_and_the_models_words_are_kept(name: str, answer: str) -> None:
    """An image of 100 × 50 pixels, which Qwen2.5-VL sees as 112 × 56 and Qwen3-VL in thousandths."""
    vlm = make_vlm(name, torch.float32)
    prompt = vlm.prompts.build(Sample("s", [Image.new("RGB", (100, 50))], "Where?", None), coordinates=True)
    assert vlm.family.coordinates != CoordinateSpace.RESIZED_PIXELS or prompt.resized_sizes == ((112, 56),)
    said = Answer(torch.tensor([1]), torch.zeros(1), torch.zeros(1), closed=True, text=answer, raw=answer)
    thought = Thought(said.ids, said.logprobs, said.entropies, torch.tensor([2]), True, "", "", answers=(said,))
    (scored,) = score_trees(RewardWorkers(Boxes("", ".")), [RolloutTree(prompt, (thought,))])
    numbers = [float(number) for number in json.loads(scored.answers[0][0])]
    assert numbers == pytest.approx([50, 0, 100, 25], abs=0.01)
    assert scored.tree.thoughts[0].answers[0].text == answer


# ---- patch factor ----


@pytest.mark.parametrize("size", [(100, 50), (1, 1), (13, 200), (3, 500), (640, 427)])
@pytest.mark.parametrize(("name", "patch"), [("qwen2_vl", 14), ("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_the_resized_size_is_that_of_the_processors_own_grid(name: str, patch: int, size: tuple[int, int]) -> None:
    vlm = make_vlm(name, torch.float32)
    prompt = vlm.prompts.build(Sample("s", [Image.new("RGB", size)], "Where?", None))
    _, rows, columns = prompt.pixels["image_grid_thw"][0].tolist()
    assert prompt.resized_sizes == ((columns * patch, rows * patch),)


def test_another_patch_size_needs_no_change_of_code() -> None:
    processor = families.load_processor("qwen2_5_vl")
    processor.image_processor.patch_size = 10
    vlm = VLM(families.load_model("qwen2_5_vl", torch.float32), processor)
    prompt = vlm.prompts.build(Sample("s", [Image.new("RGB", (100, 50))], "Where?", None))
    _, rows, columns = prompt.pixels["image_grid_thw"][0].tolist()
    assert prompt.resized_sizes == ((columns * 10, rows * 10),)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_an_aspect_ratio_that_the_processor_refuses_names_the_sample(name: str) -> None:
    with pytest.raises(UserError, match=r"sample 'thin'.*1×5000.*on_bad_sample"):
        make_vlm(name, torch.float32).prompts.build(Sample("thin", [Image.new("RGB", (1, 5000))], "Where?", None))


# ---- prompts are never cut ----


def test_a_prompt_is_whole_or_left_out_at_every_limit(tiny: VLM) -> None:
    sample = Sample("s", families.noise_images(3), "Where is the red box?", None)
    whole = tiny.prompts.build(sample)
    for limit in (1, *range(len(whole.ids) - 60, len(whole.ids), 12), len(whole.ids) - 1, len(whole.ids)):
        for choice in ("skip", "error"):
            reader = PromptReader(tiny.prompts, Mixed("", "."), DataConfig(on_long_prompt=choice), limit)
            if limit >= len(whole.ids):
                assert torch.equal(reader.read([sample])[0].ids, whole.ids)
            elif choice == "skip":
                assert reader.read([sample]) == [] and reader.skipped.long == 1
            else:
                with pytest.raises(UserError, match=rf"sample 's'.*{len(whole.ids)} tokens.*max_prompt_length"):
                    reader.read([sample])


# ---- features belong to images, images to prompts ----


@pytest.mark.parametrize("name", families.IMAGE_FAMILIES)
def test_images_of_a_batch_stay_with_their_prompts(name: str) -> None:
    vlm = make_vlm(name)
    prompts = [vlm.prompts.build(sample) for sample in make_samples(1, 0, 3)]
    with torch.no_grad():
        together = vlm.encode(prompts)
        for prompt, features in zip(prompts, together, strict=True):
            (alone,) = vlm.encode([prompt])
            assert (features is None) == (alone is None) == (not prompt.sample.images)
            for ours, theirs in zip(features.tensors if features else (), alone.tensors if alone else (), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


# ---- features of a tower that trains ----


@pytest.mark.parametrize("trains", [True, False])
def test_features_of_an_update_are_those_of_the_present_weights(trains: bool) -> None:
    vlm = fresh_tiny(freeze_vision=not trains)
    config = replace(ODD, num_iterations=2, prompts_per_minibatch=1, prompts_per_step=2)
    trainer = make_trainer(vlm, config)
    plain = vlm.logprobs
    start = vlm.encode([vlm.prompts.build(sample) for sample in make_samples(1)])[0]
    used: list[Tensor] = []

    def watched(row, features):
        if torch.is_grad_enabled():
            with torch.no_grad():
                present = join_features(vlm.encode(row.prompts))
            assert torch.equal(features.pooled[0], present.pooled[0]), "the features are stale"
            used.append(features.pooled[0].detach().clone())
        return plain(row, features)

    vlm.logprobs = watched
    trainer.step(1, make_samples(1, 1))
    assert len(used) == 4  # two passes of two minibatches
    after = vlm.encode([vlm.prompts.build(sample) for sample in make_samples(1)])[0]
    assert torch.equal(start.pooled[0], after.pooled[0]) is not trains
    assert torch.equal(used[0], used[2]) is not trains


def test_a_frozen_tower_runs_once_a_step_and_a_trained_one_once_a_pass() -> None:
    for trains, expected in ((False, 1), (True, 1 + 2)):  # in the rollout, and in each of two passes
        vlm = fresh_tiny(freeze_vision=not trains)
        trainer = make_trainer(vlm, replace(ODD, num_iterations=2))
        trainer.step(1, make_samples(1, 2))  # the first step looks at the negative too
        calls: list[int] = []
        vlm.base.get_submodule("model.visual").register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.step(2, make_samples(1, 2))
        assert len(calls) == expected


# ---- models that do not look ----


@pytest.mark.parametrize("blind", ["model.visual.merger", "model.visual.patch_embed"])
def test_a_model_whose_tower_or_projector_is_blind_is_refused(blind: str) -> None:
    vlm = fresh_tiny()
    with torch.no_grad():
        for parameter in vlm.base.get_submodule(blind).parameters():
            parameter.zero_()
    trainer = make_trainer(vlm, ODD)
    trainer.step(1, make_samples(0))  # says nothing about images
    with pytest.raises(UserError, match="does not look at its images"):
        trainer.step(2, make_samples(1, 1))


def test_plain_and_smallest_images_are_no_blindness() -> None:
    images = [Image.new("RGB", (28, 28), "white"), Image.new("RGB", (56, 56), (127, 127, 127))]
    trainer = make_trainer(fresh_tiny(), ODD)
    trainer.step(1, [Sample(str(i), [image], "Why?", None) for i, image in enumerate(images)])


# ---- a loss of 0 ----


def test_a_loss_of_zero_comes_with_the_numbers_that_explain_it() -> None:
    metrics = make_trainer(fresh_tiny(), ODD).step(1, make_samples(1, 0)).metrics
    assert metrics["loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["grad_norm"] > 0.01
    assert {"frac_reward_zero_std", "frac_thought_zero_std", "reward_std", "skipped_steps"} <= metrics.keys()


# ---- gradients that are not finite, and no tokens at all ----


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_counted_and_ends_the_run_after_some() -> None:
    vlm = fresh_tiny()
    trainer = make_trainer(vlm, replace(ODD, max_skipped_steps=2))
    weight = vlm.base.get_input_embeddings().weight
    before = {name: p.detach().clone() for name, p in vlm.model.named_parameters()}
    handle = weight.register_hook(lambda grad: grad * math.nan)
    for number in (1, 2):
        metrics = trainer.step(number, make_samples(0)).metrics
        assert metrics["skipped_steps"] == number and not math.isfinite(metrics["grad_norm"])
    assert all(torch.equal(before[name], p) for name, p in vlm.model.named_parameters())
    assert not trainer.optimizer.adamw.state, "momentum knows nothing of it"
    handle.remove()
    assert trainer.step(3, make_samples(0)).metrics["skipped_steps"] == 2
    assert not all(torch.equal(before[name], p) for name, p in vlm.model.named_parameters())
    weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(UserError, match=r"3 steps were skipped.*learning_rate.*max_skipped_steps"):
        trainer.step(4, make_samples(0))


def test_a_minibatch_without_a_scored_token_is_a_loss_of_zero() -> None:
    trainer = make_trainer(make_vlm(), CONFIG)
    assert set(trainer.backward([], on_policy=True).values()) == {0.0}
    (graded,) = graded_trees(trainer.vlm, images=(0,))
    nothing = group_advantages(torch.full((CONFIG.num_thoughts, CONFIG.num_answers), math.nan), CONFIG)
    assert trainer.backward([replace(graded, advantages=nothing)], on_policy=True)["loss"] == 0
    assert all(p.grad is None for p in trainer.vlm.model.parameters())


# ---- rewards ----

HANGING = """
    import os
    import time
    from vlm_grpo.task import Reward, Sample, TaskAdapter

    class Hanging(TaskAdapter):
        reward_timeout_s = {limit}

        def samples(self, split):
            return [Sample("one", [], "Why?", {target}), Sample("two", [], "Why?", None)]

        def prepare_reward(self):
            time.sleep({preparation})

        def reward(self, sample, answer):
            if answer == "hang":
                while True:
                    pass
            if answer == "sleep":
                time.sleep(1000)
            if answer == "die":
                os._exit(3)
            if answer == "raise":
                raise KeyError("k")
            if answer == "none":
                return None
            return Reward(float(len(answer)), {{"pid": float(os.getpid())}})

        def reference_answer(self, sample):
            return "yes"
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch) -> Iterator:
    """Makes a task whose reward may hang, in a module of its own that a child process can import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(limit: str = "0.5", target: str = "None", preparation: float = 0) -> TaskAdapter:
        filled = HANGING.format(limit=limit, target=target, preparation=preparation)
        (tmp_path / "hanging.py").write_text(textwrap.dedent(filled))
        sys.modules.pop("hanging", None)
        return find_task("hanging:Hanging", {})

    yield make
    sys.modules.pop("hanging", None)


def test_a_task_says_what_an_answer_earns_that_was_not_scored_in_time(hanging, monkeypatch) -> None:
    adapter = hanging()
    monkeypatch.setattr(type(adapter), "overdue_reward", lambda self, sample: Reward(0.0, {"accuracy": 0.0}))
    worker = RewardWorker(adapter)
    assert worker.score(adapter.samples("train")[0], "sleep") == Reward(0.0, {"accuracy": 0.0})
    assert worker.timeouts == 1


def test_what_a_reward_loads_first_takes_no_answer_its_time(hanging) -> None:
    worker = RewardWorker(hanging(limit="2", preparation=3))
    reward = worker.score(worker.adapter.samples("train")[0], "abc")
    assert reward is not None and reward.value == 3 and worker.timeouts == 0


def test_a_reward_that_hangs_is_killed_at_its_deadline_and_counted(hanging) -> None:
    worker = RewardWorker(hanging())
    one, two = worker.adapter.samples("train")
    first = worker.score(one, "abc")
    assert first is not None and first.value == 3 and first.parts["pid"] != os.getpid()
    assert worker.score(two, "ab") == Reward(2.0, first.parts), "one process serves all answers"
    for count, answer in enumerate(("hang", "sleep"), start=1):
        began = time.monotonic()
        assert worker.score(one, answer) is None
        assert 0.5 <= time.monotonic() - began < 5 and worker.timeouts == count
        again = worker.score(one, "abcd")
        assert again is not None and again.value == 4 and again.parts != first.parts, "a new process took over"
    assert worker.score(one, "none") is None and worker.timeouts == 2
    for pid in {first.parts["pid"]}:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_reward_that_raises_or_dies_behind_a_deadline_names_task_and_sample(hanging) -> None:
    worker = RewardWorker(hanging())
    one, _ = worker.adapter.samples("train")
    with pytest.raises(UserError, match=r"task hanging:Hanging, sample 'one'.*KeyError: 'k'"):
        worker.score(one, "raise")
    with pytest.raises(UserError, match=r"task hanging:Hanging, sample 'one'.*status 3"):
        worker.score(one, "die")
    assert worker.score(one, "a") is not None


def test_the_child_of_a_reward_worker_ends_with_it(hanging) -> None:
    worker = RewardWorker(hanging())
    reward = worker.score(worker.adapter.samples("train")[0], "a")
    assert reward is not None
    del worker
    with pytest.raises(ProcessLookupError):
        os.kill(int(reward.parts["pid"]), 0)


def test_a_deadline_needs_a_task_that_can_be_sent_and_a_time(hanging) -> None:
    with pytest.raises(UserError, match="task hanging:Hanging: it sets reward_timeout_s"):
        worker = RewardWorker(hanging(target="lambda: None"))
        worker.score(worker.adapter.samples("train")[0], "a")
    with pytest.raises(UserError, match="reward_timeout_s is 0"):
        RewardWorker(hanging(limit="0"))


def test_timeouts_are_metrics_and_their_answers_have_no_advantage(hanging) -> None:
    adapter = hanging()
    trainer = make_trainer(fresh_tiny(), ODD)
    trainer.workers = RewardWorkers(adapter)
    rollout = trainer.engine.rollout

    def one_hangs(*args):
        (tree,) = rollout(*args)
        thought = tree.thoughts[1]
        answers = (replace(thought.answers[0], text="hang"), *thought.answers[1:])
        return [replace(tree, thoughts=(tree.thoughts[0], replace(thought, answers=answers), tree.thoughts[2]))]

    trainer.engine.rollout = one_hangs
    trainer.optimizer.step = lambda *_: 0.0
    result = trainer.step(1, make_samples(0))
    assert (result.metrics["reward_timeouts"], result.metrics["answers_without_reward"]) == (1, 1)
    row = result.rows[5]
    assert (row.model_answer, row.reward, row.answer_advantage) == ("hang", None, 0.0)
    graded = torch.tensor([math.nan if r.reward is None else r.reward for r in result.rows]).view(3, 5)
    assert result.metrics["reward"] == pytest.approx(float(graded[~graded.isnan()].mean()))
    assert row.thought_advantage == pytest.approx(float(group_advantages(graded, ODD).thoughts[1]))


# ---- the gradient does not depend on the split ----


@pytest.fixture(scope="module")
def trees() -> tuple[VLM, list[Graded]]:
    """Recorded trees of prompts with 1, 0, 3, 0 and 1 images, some answers without reward; in float64."""
    vlm = make_vlm()
    vlm.keep_reference()
    return vlm, graded_trees(vlm)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
@pytest.mark.parametrize("row", [1, 200, 4096])
def test_the_gradient_is_the_same_for_every_row_size_and_order_of_prompts(
    trees, row: int, order: Sequence[int]
) -> None:
    vlm, graded = trees
    expected = gradient(make_trainer(vlm, replace(CONFIG, max_tokens_per_row=10_000)), graded)
    ours = gradient(make_trainer(vlm, replace(CONFIG, max_tokens_per_row=row)), [graded[i] for i in order])
    assert difference(ours, expected) < 1e-9  # float64, summed in another order


def test_the_gradient_weighs_every_prompt_alike(trees) -> None:
    """A minibatch's gradient is the mean of its prompts' own, whatever their numbers of tokens and images."""
    vlm, graded = trees
    together = gradient(make_trainer(vlm), graded)
    each = [gradient(make_trainer(vlm), [g]) for g in graded]
    mean = {n: sum((g[n] if n in g else torch.zeros(()) for g in each), torch.zeros(())) / len(each) for n in together}
    # The weights that hold the denominators are float32
    assert difference(mean, together) < 1e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What two processes with unequal prompts found, by rank; a hang ends in a timeout."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    script = [sys.executable, str(Path(__file__).parents[1] / "support" / "two_ranks.py"), str(folder)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    found[0]["metrics"] = [json.loads(line) for line in (folder / "less" / "metrics.jsonl").read_text().splitlines()]
    found[0]["said"] = done.stderr
    return found


def test_the_gradient_of_two_processes_with_unequal_prompts_is_that_of_one(ranks) -> None:
    assert len(ranks[0]["errors"]) == 12 and max(ranks[0]["errors"].values()) < 1e-9
    assert ranks[0]["errors"] == ranks[1]["errors"]


@pytest.mark.parametrize("run", ["less", "none"])
def test_processes_with_unequal_prompts_end_with_the_same_weights(ranks, run: str) -> None:
    assert ranks[0][run]["weights"] == ranks[1][run]["weights"]


def test_what_another_process_skips_is_counted_and_named(ranks) -> None:
    assert [rank["less"]["skipped"] for rank in ranks] == [0, 1]
    assert ranks[0]["metrics"][-1]["skipped_bad_samples"] == 1
    assert ranks[0]["said"].count("skipped: sample 'train-2'") == 1


# ---- one distribution on both sides ----


@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}])
def test_the_ratio_is_one_on_policy_whatever_the_sampling(options: dict) -> None:
    vlm = load_vlm(ModelConfig(), options.get("temperature", 1.0), CPU)
    metrics = make_trainer(vlm, replace(ODD, **options, beta=0.0)).step(1, make_samples(1)).metrics
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)  # float32


# ---- adapters, checkpointing, modes ----


def perturbed_adapters(checkpointing: bool) -> VLM:
    """Adapters on the language model, away from their start, where half of them have no gradient."""
    vlm = fresh_tiny(lora_r=4, gradient_checkpointing=checkpointing)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in vlm.model.named_parameters():
            if parameter.requires_grad:
                assert "lora" in name and "visual" not in name
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return vlm


def test_adapters_behind_a_checkpointed_frozen_tower_get_the_gradients_they_get_without() -> None:
    plain = gradient(make_trainer(perturbed_adapters(False), ODD), graded_trees(perturbed_adapters(False), ODD, (1, 2)))
    vlm = perturbed_adapters(True)
    assert any(
        module.gradient_checkpointing for module in vlm.model.modules() if hasattr(module, "gradient_checkpointing")
    )
    saved = gradient(make_trainer(vlm, ODD), graded_trees(vlm, ODD, (1, 2)))
    assert plain.keys() == saved.keys() == {n for n, p in vlm.model.named_parameters() if p.requires_grad}
    assert all(bool(g.any()) for g in saved.values())
    assert difference(saved, plain) < 1e-5  # float32


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "lora_r": 2}])
def test_a_step_leaves_modes_and_caches_as_they_were(options: dict) -> None:
    vlm = fresh_tiny(**options)

    def state() -> list:
        modes = [module.training for module in vlm.model.modules()]
        configs = [vlm.config.use_cache if hasattr(vlm.config, "use_cache") else None, vlm.config.text_config.use_cache]
        return [modes, configs, torch.is_grad_enabled(), vlm.base.get_output_embeddings().forward.__func__]

    before = state()
    make_trainer(vlm, ODD).step(1, make_samples(1, 0))
    assert state() == before and not any(before[0])


def test_a_trainable_weight_without_a_gradient_is_named_in_the_first_step() -> None:
    vlm = fresh_tiny()
    vlm.model.forgotten = nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r"1 trainable weights got no gradient.*forgotten"):
        make_trainer(vlm, ODD).step(1, make_samples(0))


# ---- logits ----


def scored_row(vlm: VLM, graded: Sequence[Graded]):
    ones = [(torch.ones(3), torch.ones(3, 2), torch.rand(3), torch.rand(3, 2)) for _ in graded]
    row = pack([with_weights(tree_segments(g.scored.tree), *w) for g, w in zip(graded, ones, strict=True)])
    return row, join_features([g.features for g in graded])


def test_the_output_head_sees_scored_positions_only(trees) -> None:
    vlm, graded = trees
    row, features = scored_row(vlm, graded)
    seen: list[int] = []
    head = vlm.base.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    vlm.logprobs(row, features)
    handle.remove()
    sampled = sum(g.scored.tree.num_sampled for g in graded)
    assert seen == [sampled] and sampled < len(row.input_ids)


def test_scoring_in_chunks_changes_no_number_and_holds_no_more_logits_than_a_chunk(trees, monkeypatch) -> None:
    vlm, graded = trees
    row, features = scored_row(vlm, graded)
    head = vlm.base.get_output_embeddings()
    results = []
    for rows in (10_000, 7):
        monkeypatch.setattr(head_module, "LOGIT_ELEMENTS", rows * head.weight.shape[0])
        sizes: list[int] = []
        with monkeypatch.context() as patched:
            plain = head.forward
            patched.setattr(head, "forward", lambda x, plain=plain, sizes=sizes: sizes.append(len(x)) or plain(x))
            vlm.model.zero_grad(set_to_none=True)
            logprobs = vlm.logprobs(row, features)
            (logprobs * row.weights).sum().backward()
        assert max(sizes) <= rows and sum(sizes) >= len(row.targets)
        results.append(
            (logprobs.detach(), {n: p.grad.clone() for n, p in vlm.model.named_parameters() if p.grad is not None})
        )
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-12, rtol=0)
    assert difference(results[1][1], results[0][1]) < 1e-12  # float64


# ---- sizes that divide nothing ----


def test_nothing_has_to_divide_anything() -> None:
    trainer = make_trainer(fresh_tiny(), replace(ODD, prompts_per_step=3, prompts_per_minibatch=2, rollout_lanes=2))
    steps: list[int] = []
    trainer.optimizer.adamw.register_step_pre_hook(lambda *_: steps.append(1))
    result = trainer.step(1, make_samples(1, 0, 2))
    assert len(result.rows) == 3 * 3 * 5 and len(steps) == 2
    assert all(math.isfinite(value) for value in result.metrics.values())


# ---- optional packages, and pickles ----

SOURCES = sorted(path for folder in ("vlm_grpo", "tasks", "data_scripts") for path in (ROOT / folder).rglob("*.py"))
OPTIONAL = {"flash_attn", "kernels", "timm", "num2words", "deepspeed", "vllm", "trl"}


def imports_on_import(tree: ast.Module) -> set[str]:
    """Packages that are imported when the module is, whether or not inside a class, a condition or a try."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        waiting.extend(ast.iter_child_nodes(node))
    return found


def test_no_optional_package_is_imported_before_it_is_asked_for() -> None:
    needy = {str(path): sorted(imports_on_import(ast.parse(path.read_text())) & OPTIONAL) for path in SOURCES}
    assert not {path: names for path, names in needy.items() if names}


def unpickling(source: str) -> list[str]:
    """Expressions that can make an object of any class from bytes, or run text as code."""
    anywhere = {"eval", "exec", "compile", "__import__"}
    methods = {"pickle.load", "pickle.loads", "torch.load", "dill.load", "joblib.load", "marshal.loads", "yaml.load"}
    methods |= {
        "cloudpickle.load",
        "shelve.open",
        "pandas.read_pickle",
        "pd.read_pickle",
        "pickle.Unpickler",
        "yaml.unsafe_load",
    }
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = {"allow_pickle", "trust_remote_code"} & {k for k, v in keywords.items() if v != "False"}
            if called in anywhere | methods or unsafe:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "marshal"):
            found += [alias.name for alias in node.names if alias.name in ("load", "loads", "Unpickler")]
    return found


def test_nothing_is_unpickled_but_by_the_reader_that_admits_no_class() -> None:
    assert unpickling("import pickle\npickle.load(open('x'))") and unpickling("np.load(p, allow_pickle=True)")
    found = {path.name: expressions for path in SOURCES if (expressions := unpickling(path.read_text()))}
    # what runs in the closed children of a task whose answers are code
    in_children = found.pop("_sandboxed.py")
    assert all(expression.startswith(("exec(compile(", "compile(", "eval(compile(")) for expression in in_children)
    assert not found
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Unpickler") for base in node.bases)
    }
    assert readers == {"data_scripts/refcoco.py"}
