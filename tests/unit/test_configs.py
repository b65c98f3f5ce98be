"""The shipped configurations, against the real classes: everything short of the real weights."""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.torch import load_file
from support import families

from tasks.refcoco import RefCOCO
from vlm_grpo.common.config import load_config
from vlm_grpo.common.errors import UserError
from vlm_grpo.common.processes import Processes
from vlm_grpo.model.families import FAMILIES, resized_sizes
from vlm_grpo.model.load import ModelConfig, load_vlm
from vlm_grpo.scoring import parse_box
from vlm_grpo.task import Reward, check_task, find_task
from vlm_grpo.train import TrainConfig, train

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN_3B = CONFIGS / "refcoco_qwen2_5_vl_3b.yaml"
CPU = torch.device("cpu")

# The architecture of Qwen/Qwen2.5-VL-3B-Instruct, from its config.json
QWEN_3B_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
QWEN_3B_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder as data_scripts.refcoco writes it: four expressions a split, images of different shapes."""
    folder = tmp_path_factory.mktemp("refcoco")
    for split in ("train", "val"):
        rows = []
        for index, (width, height) in enumerate([(60, 40), (90, 33), (100, 50), (41, 80)]):
            image = f"{split}-{index}.png"
            families.noise_images(1, seed=index)[0].resize((width, height)).save(folder / image)
            box = [2.5, 4.0, width / 2, height / 2]
            rows.append({"id": f"{split}-{index}", "image": image, "expression": f"the box {index}", "bbox_xyxy": box})
            rows[-1] |= {"width": width, "height": height}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def qwen() -> Path:
    """A tiny random model of the class of the configuration's, with the structure of its chat template."""
    return families.cached_folder("qwen2_5_vl")


def lengthy(self: RefCOCO, sample: object, answer: str) -> Reward:
    """A random model writes no boxes: here, any answer earns something by its length."""
    value = len(answer) % 5 / 5
    return Reward(value, {"iou": value, "acc@0.5": float(value > 0.5), "parsed": float(parse_box(answer) is not None)})


@pytest.fixture(scope="module")
def run(data: Path, qwen: Path) -> Callable[..., None]:
    """Trains by the 3B configuration with the weights, the data and the sizes of a test."""
    sizes = {"max_steps": 2, "prompts_per_step": 2, "max_thought_length": 7, "max_answer_length": 6, "save_steps": 1}
    sizes |= {"warmup_steps": 1}

    def run(**changes: Any) -> None:
        given = {"model": qwen, "task_args.data": data} | sizes | changes
        config = load_config(TrainConfig, [f"config={QWEN_3B}", *(f"{key}={value}" for key, value in given.items())])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RefCOCO, "reward", lengthy)
            train(config, Processes())

    return run


@pytest.fixture(scope="module")
def job(run: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "job"
    run(output_dir=folder)
    return folder


def test_lora_of_the_3b_model_trains_the_language_model_alone() -> None:
    from vlm_grpo.model.load import _with_adapters

    config = load_config(TrainConfig, [f"config={QWEN_3B}"])
    with torch.device("meta"):
        model = tf.Qwen2_5_VLForConditionalGeneration(
            tf.Qwen2_5_VLConfig(text_config=QWEN_3B_TEXT, vision_config=QWEN_3B_VISION, tie_word_embeddings=True)
        )
    model.requires_grad_(False)
    adapted = _with_adapters(model, FAMILIES["qwen2_5_vl"], config, None)
    trained = [(name, p.numel()) for name, p in adapted.named_parameters() if p.requires_grad]
    # Rank 64 times (inputs + outputs) of q, o: 2048 to 2048; k, v: 2048 to 256; gate, up, down: 2048 and 11008
    of_layer = 64 * (2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 11008))
    assert sum(count for _, count in trained) == 36 * of_layer == 119_734_272
    assert all(".language_model.layers." in name and "lora_" in name for name, _ in trained)
    assert adapted.peft_config["default"].lora_alpha / adapted.peft_config["default"].r == 2


def test_pixel_limits_of_the_3b_configuration_keep_coco_images_and_bound_large_ones(qwen: Path) -> None:
    config = load_config(TrainConfig, [f"config={QWEN_3B}", f"model={qwen}"])
    processor = load_vlm(config, config.temperature, CPU).processor
    coco, photograph = resized_sizes(processor.image_processor, [(640, 480), (4000, 3000)])
    assert coco == (644, 476)  # the nearest multiples of 28: 23 x 17 image tokens
    assert math.prod(photograph) <= 1_003_520 == 1280 * 28 * 28
    assert photograph[0] / photograph[1] == pytest.approx(4 / 3, rel=0.03)


def test_the_3b_job_trains_adapters_alone_and_saves_what_plain_libraries_load(job: Path, qwen: Path) -> None:
    for checkpoint in (job / "checkpoint-1", job / "checkpoint-2"):
        names = {path.name for path in checkpoint.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "processor_config.json"} <= names
        assert {"optimizer.safetensors", "trainer_state.json", "generation_config.json"} <= names
        assert not names & {"model.safetensors", "config.json"}, "the frozen weights are not saved again"
        stepped = load_file(checkpoint / "optimizer.safetensors")
        assert stepped and all("lora_" in name and ".visual." not in name for name in stepped)
    first, second = (load_file(job / f"checkpoint-{n}" / "adapter_model.safetensors") for n in (1, 2))
    assert set(first) == set(second) and all("lora_" in name for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert (job / "adapter_model.safetensors").is_file()

    processor = tf.AutoProcessor.from_pretrained(job)
    assert dict(processor.image_processor.size) == {"shortest_edge": 3136, "longest_edge": 1003520}
    plain = tf.AutoModelForImageTextToText.from_pretrained(job).eval()
    base = tf.AutoModelForImageTextToText.from_pretrained(qwen).eval()
    inputs = families.prompt_inputs("qwen2_5_vl", families.noise_images(1))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # of peft
        untrained = base(**inputs).logits
        peft = PeftModel.from_pretrained(base, str(job)).eval()
        assert torch.equal(plain(**inputs).logits, peft(**inputs).logits)
        assert not torch.equal(untrained, peft(**inputs).logits)
        # merged weights are rounded once more
        merged = load_vlm(ModelConfig(model=str(job)), 1.0, CPU)
        merged.model.set_attn_implementation("sdpa")
        torch.testing.assert_close(merged.model(**inputs).logits, peft(**inputs).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"holds LoRA adapters.*lora_r=0"):
        load_vlm(ModelConfig(model=str(job), lora_r=4), 1.0, CPU)


def test_the_3b_job_resumes_to_the_same_adapters(job: Path, run: Callable[..., None], tmp_path: Path) -> None:
    run(output_dir=tmp_path / "run", resume_from_checkpoint=job / "checkpoint-1")
    expected, resumed = (load_file(folder / "adapter_model.safetensors") for folder in (job, tmp_path / "run"))
    assert set(resumed) == set(expected)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_data_of_the_3b_job_is_a_valid_task(data: Path) -> None:
    config = load_config(TrainConfig, [f"config={QWEN_3B}", f"task_args.data={data}"])
    for split in (config.train_split, config.eval_split):
        check_task(find_task(config.task, config.task_args), split)


def test_tiny_configuration_is_the_embedded_default() -> None:
    default = load_config(TrainConfig, ["task=refcoco"])
    tiny = load_config(TrainConfig, [f"config={CONFIGS / 'tiny_cpu.yaml'}"])
    assert replace(tiny, output_dir=None, task_args={}) == default
    assert tiny.task_args == dict(RefCOCO.demo_args)
