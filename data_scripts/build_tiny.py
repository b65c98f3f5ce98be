"""The first and the last step of building the shipped tiny model; `make tiny` runs them with the warm start in between.

    python -m data_scripts.build_tiny out=DIR              the random model with its tokenizer and processor
    python -m data_scripts.build_tiny out=DIR trained=DIR  a trained one in bfloat16, as it is shipped

The model is a ``Qwen2_5_VLForConditionalGeneration`` with Qwen2.5-VL's special tokens and chat template.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from data_scripts.writing import required, run_script

PATCH, MERGE = 14, 2
MIN_PIXELS, MAX_PIXELS = 4 * (PATCH * MERGE) ** 2, 9 * (PATCH * MERGE) ** 2  # 4 to 9 image tokens

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # one token each, but ordinary text: decoding keeps them

# Qwen2's rule, except that punctuation before a digit takes the space along, so that "[8, 15" is five tokens, not six.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[,;:] (?=\p{N})"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen2.5-VL's own template.
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What is frequent in prompts and scenes becomes one token; all else is spelt in pieces and bytes.
TEXT = """
system
You are a helpful assistant.
user
assistant
Locate: the red ring
Locate: the small red ring
Locate: the large green square
Locate: the left blue cross
Locate: the right yellow ring
Locate: the top purple square
Locate: the bottom red shape
What is at [10, 24, 53, 86]?
List all from left to right.
Name all from left to right.
left to right
red ring, top left [10, 24, 53, 86]; green square, centre middle [10, 24, 53, 86]; blue cross, bottom right [7]
yellow ring, top middle; purple square, centre left; red cross, centre right; red square, bottom middle
Coordinates are integer pixels of the image, which is 112 wide and 84 high.
Coordinates are integers from 0 to 1000, relative to the width and height of the image.
Coordinates are decimals from 0 to 1, relative to the width and height of the image.
First think inside <think> </think>, then give the answer inside <answer> </answer>.
Give the bounding box of the object as one box [10, 24, 53, 86].
who how many are was were be on by for with or not this that it as has have
The answer is yes no one two three four five six seven eight nine ten above below
""".strip()


def make_tokenizer(vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on TEXT; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines() * 10, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        padding_side="left",
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, patch_size=PATCH, merge_size=MERGE),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size, patch_size=PATCH, merge_size=MERGE),
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A random model. Wide initial weights (0.08): at the usual 0.02 a model this small does not learn to see."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "initializer_range": 0.08,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "bos_token_id": ids("<|endoftext|>"),
            "eos_token_id": ids("<|im_end|>"),
            "pad_token_id": ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.08,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        initializer_range=0.08,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids("<|im_end|>"), ids("<|endoftext|>")], pad_token_id=ids("<|endoftext|>"), do_sample=False
    )
    return model


def save_untrained(folder: Path, seed: int = 0) -> None:
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed).to(torch.bfloat16).save_pretrained(folder)
    make_processor(tokenizer).save_pretrained(folder)


def save_shipped(trained: Path, folder: Path) -> None:
    """The trained model in bfloat16, with the files beside it that plain transformers needs."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(trained, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    Qwen2_5_VLProcessor.from_pretrained(trained).save_pretrained(folder)


def convert(options: Mapping[str, str]) -> list[str]:
    """Builds as the options say; the lines to print."""
    [out] = required(options, "out")
    if "trained" in options:
        save_shipped(Path(options["trained"]), Path(out))
    else:
        save_untrained(Path(out))
    return [out]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, ("out", "trained"), convert, sys.argv[1:]))
