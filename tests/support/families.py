"""Tiny random models of every supported family, and the slow, obvious oracle that the tree engine is compared with.

Nothing here uses the package under test. `build` writes a checkpoint and processor files that load with plain
transformers; `unpacked_logprobs` is an ordinary forward of one prompt and one response, `greedy` is transformers' own
`generate`. Letters: P prompt tokens, A response tokens, V vocabulary, all of one prompt in a batch of one.
"""

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

SEED = 20
INITIALIZER_RANGE = 0.2  # at the usual 0.02 a tiny model answers everything alike, and errors hide
WINDOW = 8  # of the sliding-window layers: shorter than any prompt here
IMAGE_SIZES = ((60, 40), (33, 90), (100, 50))  # (width, height) in pixels

CORPUS = "<think>the red box</think>\n<answer>[10, 20, 30, 40]</answer> the answer is a box in the image"

# The structure of the real chat templates, without tools and videos.
ITEMS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ 'IMAGE' }}{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    + ITEMS
    + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    + ITEMS.replace("IMAGE", "<image>")
    + "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA_ONEVISION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for item in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for item in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + item['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    + ITEMS.replace("IMAGE", "<start_of_image>").replace("['text'] }}", "['text'] | trim }}")
    + "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def byte_level_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of a byte-level BPE (GPT-2, Qwen), in which tags and brackets merge with others."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet, special=[], merges=40)


def byte_fallback_bpe(special: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The same for SentencePiece-like tokenizers (Llama, Gemma): special tokens, 256 bytes, characters and merges."""
    alphabet = ["▁", *map(chr, range(33, 127))]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return trained_bpe(pre_tokenizers.Metaspace(split=False), alphabet, [*special, *bytes_], merges=20)


def trained_bpe(pre_tokenizer, alphabet: list[str], special: list[str], merges: int):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + merges,
        initial_alphabet=alphabet,
        special_tokens=special,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    return trained["vocab"], [tuple(merge) for merge in trained["merges"]]


def byte_level_tokenizer(tokenizer_class: type, *special: str, **tokens: str) -> tf.PreTrainedTokenizerBase:
    """A tokenizer of a byte-level class; `tokens` are named ones: `eos_token`, but also `image_token` and its kind."""
    vocab, merges = byte_level_bpe()
    standard = {"unk_token", "bos_token", "eos_token", "pad_token"}
    named = {name: token for name, token in tokens.items() if name not in standard}
    unnamed = {f"special_{index}_token": token for index, token in enumerate(special)}
    kwargs = {name: tokens.get(name, "<|endoftext|>") for name in standard}
    return tokenizer_class(vocab=vocab, merges=merges, extra_special_tokens=named | unnamed, **kwargs)


def text_sizes(tokenizer: tf.PreTrainedTokenizerBase) -> dict:
    """Sizes that every language model shares; the vocabulary is padded beyond the tokenizer's, as real ones are."""
    return {
        "vocab_size": len(tokenizer) + 7,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def vit_sizes(image_size: int | list[int], patch_size: int | list[int]) -> dict:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": patch_size,
        "initializer_range": INITIALIZER_RANGE,
    }


def save(folder: Path, model_class: type, config: tf.PreTrainedConfig, processor, *eos_tokens: str) -> None:
    """Write a random model and its processor; `eos_tokens` end generation beside the tokenizer's own."""
    torch.manual_seed(SEED)
    model = model_class(config)
    with torch.no_grad():  # biases start at 0, norms at 1, Gemma 3's projection at 0: errors in them would not show
        for parameter in model.parameters():
            if parameter.ndim < 2 or not parameter.any():
                parameter.add_(torch.randn_like(parameter), alpha=INITIALIZER_RANGE / 2)
    tokenizer = getattr(processor, "tokenizer", processor)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(eos_tokens))]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def build_qwen_vl(name: str, folder: Path) -> None:
    tokenizer = byte_level_tokenizer(
        tf.Qwen2Tokenizer,
        "<|im_start|>",
        eos_token="<|im_end|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
        vision_pad_token="<|vision_pad|>",
    )
    patch = 16 if name in ("qwen3_vl", "qwen3_5") else 14
    area = (2 * patch) ** 2  # of one image token, in pixels
    vision = {"depth": 2, "num_heads": 2, "patch_size": patch, "initializer_range": INITIALIZER_RANGE}
    text = text_sizes(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[name]
    if name == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 48}
    if name == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if patch == 16:
        vision |= {"num_position_embeddings": 16}
        text |= {"head_dim": 12}
    if name == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1]}
        text |= {"num_hidden_layers": 3}  # a level that enters after the last layer would change no text token
    if name == "qwen3_5":
        rope |= {"partial_rotary_factor": 1.0}
        text |= LINEAR_SIZES | {"layer_types": ["linear_attention", "full_attention"]}
    config = getattr(tf, f"{kind}Config")(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id,
        tie_word_embeddings=False,
    )
    family, video = ("Qwen3VL", "Qwen3VL") if patch == 16 else (kind, "Qwen2VL")
    template = CHATML.replace("IMAGE", QWEN_IMAGE)
    processor = getattr(tf, f"{family}Processor")(
        image_processor=tf.Qwen2VLImageProcessor(
            patch_size=patch, size={"shortest_edge": 4 * area, "longest_edge": 12 * area}
        ),
        tokenizer=tokenizer,
        video_processor=getattr(tf, f"{video}VideoProcessor")(patch_size=patch),
        chat_template=template if patch == 16 else DEFAULT_SYSTEM + template,
    )
    save(folder, getattr(tf, f"{kind}ForConditionalGeneration"), config, processor, "<|endoftext|>")


def build_smolvlm(folder: Path) -> None:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = byte_level_tokenizer(
        tf.GPT2Tokenizer,
        "<|im_start|>",
        *tiles,
        eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    config = tf.SmolVLMConfig(
        text_config=text_sizes(tokenizer) | {"model_type": "llama"},
        vision_config=vit_sizes(32, 8),
        scale_factor=2,
        image_token_id=tokenizer.image_token_id,
    )
    processor = tf.SmolVLMProcessor(
        image_processor=tf.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        tokenizer=tokenizer,
        video_processor=tf.SmolVLMVideoProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        image_seq_len=4,
        chat_template=SMOLVLM,
    )
    save(folder, tf.SmolVLMForConditionalGeneration, config, processor)


def build_internvl(folder: Path) -> None:
    tokenizer = byte_level_tokenizer(
        tf.Qwen2Tokenizer,
        "<|im_start|>",
        eos_token="<|im_end|>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = tf.InternVLConfig(
        text_config=text_sizes(tokenizer) | {"model_type": "qwen2"},
        vision_config=vit_sizes([32, 32], [8, 8]),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": 32, "width": 32}
    processor = tf.InternVLProcessor(
        image_processor=tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer=tokenizer,
        video_processor=tf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    )
    save(folder, tf.InternVLForConditionalGeneration, config, processor, "<|endoftext|>")


def build_llava_onevision(folder: Path) -> None:
    tokenizer = byte_level_tokenizer(
        tf.Qwen2Tokenizer, "<|im_start|>", eos_token="<|im_end|>", image_token="<image>", video_token="<video>"
    )
    grid = [[height, width] for height in (24, 48) for width in (24, 48)]
    config = tf.LlavaOnevisionConfig(
        text_config=text_sizes(tokenizer) | {"model_type": "qwen2"},
        vision_config=vit_sizes(24, 8) | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        image_grid_pinpoints=grid,
    )
    size = {"height": 24, "width": 24}
    processor = tf.LlavaOnevisionProcessor(
        image_processor=tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        tokenizer=tokenizer,
        video_processor=tf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=9,
        vision_feature_select_strategy="full",
        chat_template=LLAVA_ONEVISION,
    )
    save(folder, tf.LlavaOnevisionForConditionalGeneration, config, processor, "<|endoftext|>")


def build_gemma3(folder: Path) -> None:
    standard = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
    vocab, merges = byte_fallback_bpe(list(standard.values()))
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    turns = {"sot_token": "<start_of_turn>", "eot_token": "<end_of_turn>"}
    tokenizer = tf.GemmaTokenizer(vocab=vocab, merges=merges, extra_special_tokens=named | turns, **standard)
    config = tf.Gemma3Config(
        text_config=text_sizes(tokenizer)
        | {
            "head_dim": 12,
            "query_pre_attn_scalar": 12,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=vit_sizes(32, 8) | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        initializer_range=INITIALIZER_RANGE,
    )
    processor = tf.Gemma3Processor(
        image_processor=tf.Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=GEMMA,
    )
    save(folder, tf.Gemma3ForConditionalGeneration, config, processor, "<end_of_turn>")


def build_gpt2(folder: Path) -> None:
    tokenizer = byte_level_tokenizer(tf.GPT2Tokenizer)
    sizes = {"vocab_size": len(tokenizer) + 7, "n_positions": 1024, "n_embd": 48, "n_layer": 2, "n_head": 4}
    eos = tokenizer.eos_token_id
    config = tf.GPT2Config(**sizes, initializer_range=INITIALIZER_RANGE, bos_token_id=eos, eos_token_id=eos)
    save(folder, tf.GPT2LMHeadModel, config, tokenizer)


def build_qwen2(folder: Path, *, window: int | None = None) -> None:
    tokenizer = byte_level_tokenizer(tf.Qwen2Tokenizer, "<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = DEFAULT_SYSTEM + CHATML
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    config = tf.Qwen2Config(**text_sizes(tokenizer), **sliding)
    save(folder, tf.Qwen2ForCausalLM, config, tokenizer, "<|endoftext|>")


def build_qwen3(folder: Path) -> None:
    tokenizer = byte_level_tokenizer(tf.Qwen2Tokenizer, "<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    config = tf.Qwen3Config(**text_sizes(tokenizer), head_dim=12)
    save(folder, tf.Qwen3ForCausalLM, config, tokenizer, "<|endoftext|>")


def build_qwen3_5_text(folder: Path) -> None:
    tokenizer = byte_level_tokenizer(tf.Qwen2Tokenizer, "<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 2, 2]}
    config = tf.Qwen3_5TextConfig(
        **text_sizes(tokenizer) | {"num_hidden_layers": 3},
        **LINEAR_SIZES | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        head_dim=12,
        rope_parameters=rope,
    )
    save(folder, tf.Qwen3_5ForCausalLM, config, tokenizer, "<|endoftext|>")


def build_llama(folder: Path) -> None:
    vocab, merges = byte_fallback_bpe(["<unk>", "<s>", "</s>"])
    tokenizer = tf.LlamaTokenizer(vocab=vocab, merges=merges, pad_token="<unk>")
    tokenizer.chat_template = LLAMA
    save(folder, tf.LlamaForCausalLM, tf.LlamaConfig(**text_sizes(tokenizer)), tokenizer)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "qwen2_vl": functools.partial(build_qwen_vl, "qwen2_vl"),
    "qwen2_5_vl": functools.partial(build_qwen_vl, "qwen2_5_vl"),
    "qwen3_vl": functools.partial(build_qwen_vl, "qwen3_vl"),
    "smolvlm": build_smolvlm,
    "internvl": build_internvl,
    "llava_onevision": build_llava_onevision,
    "gemma3": build_gemma3,
    "gpt2": build_gpt2,
    "qwen2": build_qwen2,
    "qwen2_sliding": functools.partial(build_qwen2, window=WINDOW),
    "qwen3": build_qwen3,
    "llama": build_llama,
    "qwen3_5": functools.partial(build_qwen_vl, "qwen3_5"),
    "qwen3_5_text": build_qwen3_5_text,
}
LINEAR_FAMILIES = ("qwen3_5", "qwen3_5_text")  # with linear-attention layers, which no packed row can hold
TEXT_FAMILIES = ("gpt2", "qwen2", "qwen2_sliding", "qwen3", "llama")
IMAGE_FAMILIES = tuple(name for name in BUILDERS if name not in TEXT_FAMILIES + LINEAR_FAMILIES)
READS_TEXT_ONLY = (*TEXT_FAMILIES, "qwen3_5_text")


def build(name: str, folder: Path) -> Path:
    """Write the tiny random checkpoint and the processor files of a family into `folder`; gives back the folder."""
    BUILDERS[name](folder)
    return folder


@functools.cache
def cached_folder(name: str) -> Path:
    """The family's folder, built once per process and removed at its end."""
    root = tempfile.mkdtemp(prefix=f"tiny-{name}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build(name, Path(root))


def load_model(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> tf.PreTrainedModel:
    """A fresh copy of the family's model in evaluation mode (GPT-2 has dropout)."""
    loader = AutoModelForCausalLM if name in READS_TEXT_ONLY else AutoModelForImageTextToText
    return loader.from_pretrained(cached_folder(name), dtype=dtype, attn_implementation=attention).eval()


def load_processor(name: str):
    loader = AutoTokenizer if name in READS_TEXT_ONLY else AutoProcessor
    return loader.from_pretrained(cached_folder(name))


def noise_images(count: int, seed: int = 0) -> list[Image.Image]:
    """Random images of different, non-square sizes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randint(256, (height, width, 3), generator=generator) for width, height in IMAGE_SIZES[:count]]
    return [Image.fromarray(image.byte().numpy()) for image in pixels]


def prompt_inputs(name: str, images: Sequence[Image.Image] = (), question: str = "Where is the red box?"):
    """What the processor gives for one prompt of this family: `input_ids` (1, P), pixel values, grids and the like."""
    processor = load_processor(name)
    if name == "gpt2":  # has no chat template
        return dict(processor(question, return_tensors="pt"))
    content: list[dict[str, str]] | str = [*[{"type": "image"} for _ in images], {"type": "text", "text": question}]
    if name in READS_TEXT_ONLY:
        content = question
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    kwargs = {"images": [list(images)]} if images else {}
    return dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **kwargs))


def extended(inputs: Mapping[str, Tensor], response_ids: Tensor) -> dict[str, Tensor]:
    """The prompt's inputs with the response appended as text."""
    response = response_ids[None].to(inputs["input_ids"])
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in inputs]
    sequence = torch.cat([inputs["input_ids"], response], dim=1)
    longer = {name: torch.cat([inputs[name], torch.zeros_like(response)], dim=1) for name in kinds}
    return {**inputs, **longer, "input_ids": sequence, "attention_mask": torch.ones_like(sequence)}


def unpacked_distributions(
    model: tf.PreTrainedModel,
    inputs: Mapping[str, Tensor],
    response_ids: Tensor,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
) -> Tensor:
    """log π(· | prompt, response tokens before it), (A, V), by one ordinary forward of the whole sequence.

    Differentiable down to the vision tower. Ids in `forbidden_ids` have probability 0. At least float32.
    """
    logits = model(**extended(inputs, response_ids), use_cache=False).logits[0]  # (P + A, V)
    first = inputs["input_ids"].shape[1] - 1
    logits = logits[first : first + len(response_ids)]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    forbidden[list(forbidden_ids)] = True
    return logits.masked_fill(forbidden, -torch.inf).log_softmax(dim=-1)


def unpacked_logprobs(
    model: tf.PreTrainedModel,
    inputs: Mapping[str, Tensor],
    response_ids: Tensor,
    temperature: float = 1.0,
    forbidden_ids: Sequence[int] = (),
) -> Tensor:
    """log π(response token | prompt, response tokens before it), (A,)."""
    distributions = unpacked_distributions(model, inputs, response_ids, temperature, forbidden_ids)
    return distributions.gather(1, response_ids[:, None].to(distributions.device))[:, 0]


@torch.no_grad()
def greedy(
    model: tf.PreTrainedModel, inputs: Mapping[str, Tensor], max_new_tokens: int, forbidden_ids: Sequence[int] = ()
) -> Tensor:
    """The ids (A,) that transformers' own greedy `generate` adds to the prompt, the end-of-sequence id included."""
    suppress = list(forbidden_ids) or None
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, suppress_tokens=suppress)
    return output[0, inputs["input_ids"].shape[1] :]
