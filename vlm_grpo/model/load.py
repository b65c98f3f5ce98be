"""Loads a model as the options say: from which files, in which precision, and which of its weights train."""

import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants, try_to_load_from_cache
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2VLImageProcessor,
)
from transformers.pytorch_utils import Conv1D

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.options import Range
from vlm_grpo.model.attention import Backend
from vlm_grpo.model.backend import choose_backend, find_environment
from vlm_grpo.model.families import Family, find_family, layer_types
from vlm_grpo.model.vlm import VLM
from vlm_grpo.tiny import TINY_PATH

ADAPTER_FILE = "adapter_config.json"
HUB_TIMEOUT_S = 10.0  # for the first answer of the model hub


@dataclass
class ModelConfig:
    """Which model, and which of its weights train."""

    ROOM = "model"

    # A folder or a hub name of a transformers model; tiny is the model shipped with the package
    model: str = "tiny"
    # auto: float32 weights, with bfloat16 arithmetic on a GPU; under LoRA on a GPU the frozen weights are bfloat16
    # mixed: the same on a CPU, which pays where it has matrix units for bfloat16
    dtype: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    # Attention backend for trees; auto: sdpa on a CPU, the fastest one available on a GPU, and levels for models with
    # linear-attention layers, which take no other
    attention: Literal["auto", "sdpa", "flex", "flash", "levels"] = "auto"
    # Keep the vision tower and its projector as they are; image features of the rollout then serve the update too
    freeze_vision: bool = True
    # Recompute activations in the backward pass: less memory, more time
    gradient_checkpointing: bool = False
    # Rank of LoRA adapters on the language model's linear layers; 0 trains the weights themselves
    lora_r: Annotated[int, Range(at_least=0)] = 0
    # Scale of the adapters: lora_alpha / lora_r
    lora_alpha: Annotated[int, Range(at_least=1)] = 64
    # Least pixels of an image after resizing, for families with a patch grid; none: as the model's files say
    min_pixels: Annotated[int | None, Range(at_least=1)] = None
    # Most pixels of an image after resizing, likewise
    max_pixels: Annotated[int | None, Range(at_least=1)] = None


def model_path(model: str) -> str:
    """The folder or hub name that transformers loads for the option `model`."""
    return str(TINY_PATH) if model == "tiny" else model


def load_vlm(config: ModelConfig, temperature: float, device: torch.device, checkpoint: Path | None = None) -> VLM:
    """The model with its trainable weights marked, in evaluation mode on `device`.

    With `checkpoint` the weights (or the adapters) come from that folder; everything else is as for a fresh start.

    Raises: UserError for files that are missing or not loadable, and for options that the family cannot honour.
    """
    source = model_path(config.model)
    weights = str(checkpoint) if checkpoint is not None and config.lora_r == 0 else source
    if config.lora_r > 0 and Path(source, ADAPTER_FILE).is_file():
        raise UserError(
            f"model={source} holds LoRA adapters, and new ones (lora_r={config.lora_r}) cannot stand on them: train "
            "the merged weights with lora_r=0, or save them first with peft's merge_and_unload"
        )
    dtype, autocast = _precision(config, device)
    model, processor, family = load_model(weights, dtype)
    _limit_pixels(processor, family, config)
    model.requires_grad_(config.lora_r == 0)
    if config.freeze_vision:
        for name, parameter in model.named_parameters():
            if name.startswith(family.vision_modules or ("\0",)):
                parameter.requires_grad_(False)
    model.to(device)
    if config.lora_r > 0:
        model = _with_adapters(model, family, config, checkpoint)
    backend, _ = _backend(config, family, model.config, device, autocast or dtype)  # type: ignore[arg-type]
    return VLM(model, processor, temperature, config.gradient_checkpointing, autocast, backend)


def load_model(path: str, dtype: torch.dtype) -> tuple[Any, Any, Family]:
    """The model of a folder or hub name, its processor (a tokenizer for text-only families) and its family.

    For a folder of LoRA adapters, the model is the one they were trained on, with the adapters merged into it.
    """
    _check_place(path)
    try:
        adapters = Path(path, ADAPTER_FILE).is_file()
        base = str(PeftConfig.from_pretrained(path).base_model_name_or_path) if adapters else path
        family = find_family(AutoConfig.from_pretrained(base))
        loader = AutoModelForImageTextToText if family.is_vision else AutoModelForCausalLM
        processor = (AutoProcessor if family.is_vision else AutoTokenizer).from_pretrained(path)
        model, found = loader.from_pretrained(base, dtype=dtype, output_loading_info=True)  # type: ignore
        if missing := found["missing_keys"]:
            raise ValueError(f"its files lack {len(missing)} weights, such as {min(missing)}")
        if adapters:
            with _peft_warnings_ignored():
                model = PeftModel.from_pretrained(model, path).merge_and_unload()  # type: ignore[operator]
        return model, processor, family
    # transformers and safetensors raise all of these for files that are missing, torn or of another model
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"model={path}: it cannot be loaded: {str(error).rstrip('. ')}. Accepted are `tiny`, a folder written by "
            "save_pretrained, and a hub name that is reachable or cached"
        ) from error


def _check_place(path: str) -> None:
    """Raises UserError at once if the folder does not exist or if the hub, asked once, does not answer."""
    if Path(path).is_dir():
        return
    if path.startswith((".", "/", "~")) or path.endswith("/") or path.count("/") > 1:
        raise UserError(f"model={path}: there is no such folder (the current one is {Path.cwd()})")
    if isinstance(try_to_load_from_cache(path, constants.CONFIG_NAME), str):
        return
    if failure := _hub_failure():
        raise UserError(
            f"model={path}: there is no folder of that name in {Path.cwd()} and no such model in the hub's cache, and "
            f"the hub ({constants.ENDPOINT}) cannot be reached: {failure}"
        )


def _hub_failure() -> str:
    """The reason why the model hub, asked once, does not answer; empty if it does."""
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError:  # an error page is an answer too
        return ""
    except URLError as error:
        # transformers may know certificates that Python does not
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)
    return ""


def _backend(
    config: ModelConfig, family: Family, model: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Backend, str]:
    linear = "linear_attention" in layer_types(model)
    return choose_backend(config.attention, find_environment(device, dtype, not family.image_sees_itself, linear))


def attention_summary(vlm: VLM, config: ModelConfig) -> str:
    """The attention backend and the reason for it, as one line for people."""
    _, reason = _backend(config, vlm.family, vlm.config, vlm.device, vlm.arithmetic)
    if vlm.attention == "levels":
        return f"levels, in batches of branches ({reason})"
    return f"{vlm.attention} over packed rows ({reason}), sdpa in prefill and decoding"


def _precision(config: ModelConfig, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtype of the weights, and dtype of the arithmetic if it is a different one."""
    if config.dtype == "float32":
        return torch.float32, None
    if config.dtype == "mixed":
        return torch.float32, torch.bfloat16
    if config.dtype == "bfloat16":
        return torch.bfloat16, None
    if device.type != "cuda" or not torch.cuda.is_bf16_supported():
        return torch.float32, None
    return (torch.bfloat16 if config.lora_r > 0 else torch.float32), torch.bfloat16


def _with_adapters(model: nn.Module, family: Family, config: ModelConfig, checkpoint: Path | None) -> nn.Module:
    if checkpoint is not None:
        with _peft_warnings_ignored():
            return PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)  # type: ignore[arg-type]
    head = model.get_output_embeddings()  # type: ignore[operator]
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and not (config.freeze_vision and name.startswith(family.vision_modules or ("\0",)))
    ]
    lora = LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=targets)
    # peft draws from the global generator, which a task's code may have moved; all ranks and restarts must begin alike
    with _peft_warnings_ignored(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, lora, autocast_adapter_dtype=True)  # type: ignore[arg-type]


@contextmanager
def _peft_warnings_ignored() -> Iterator[None]:
    """Inside, peft may use a property of the model that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _limit_pixels(processor: Any, family: Family, config: ModelConfig) -> None:
    if config.min_pixels is None and config.max_pixels is None:
        return
    images = getattr(processor, "image_processor", None)
    if not isinstance(images, Qwen2VLImageProcessor):
        raise UserError(
            "min_pixels and max_pixels need a family whose images keep their shape on a patch grid (Qwen2-VL and "
            f"later); {type(images).__name__} does not: leave both unset"
        )
    least = config.min_pixels or images.size["shortest_edge"]
    most = config.max_pixels or images.size["longest_edge"]
    if least > most:
        raise UserError(f"min_pixels={least} is more than max_pixels={most}")
    images.size = {"shortest_edge": least, "longest_edge": most}


def save_model_files(vlm: VLM, folder: Path) -> None:
    """Writes weights (or adapters), processor and generation config as plain transformers loads them."""
    vlm.model.save_pretrained(folder)  # type: ignore[operator]
    vlm.processor.save_pretrained(folder)
    vlm.base.generation_config.save_pretrained(folder)


def parameter_summary(vlm: VLM) -> str:
    """The number of weights and how many of them train, as one line for people."""
    every = list(vlm.model.parameters())
    total, trained = sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad)
    return f"{trained:,} of {total:,} weights train ({trained / total:.2%})"
