"""The model: load it, encode images, read prompts, decode on a shared cache, score packed rows. One class for every
family.

Letters: B rows, L new tokens per row, S keys, P prompt tokens, N packed positions, Q scored tokens, V vocabulary, D
hidden, R rows of rotary positions, G rows and C queries of the grid that attention sees: B and L without a fold.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from vlm_grpo.attention import IMPLEMENTATIONS, LINEAR, Carrier, Fold
from vlm_grpo.coordinates import instruction, to_model, to_original
from vlm_grpo.errors import UserError
from vlm_grpo.families import Family, find_family, image_blocks, layer_types, resized_sizes
from vlm_grpo.layout import TreeLayout, additive
from vlm_grpo.levels import LevelBatch, LevelCache, hold_states_over_padding, plan_levels, run_levels
from vlm_grpo.rollout import Prompt
from vlm_grpo.task import Sample
from vlm_grpo.tree import TreePack

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
FORMAT = "First think inside <think> </think>, then give the answer inside <answer> </answer>."
PIXEL_ROWS = 2**14  # patches (or tiles) of one call of the vision tower
LOGIT_ELEMENTS = 2**25  # of one chunk of the scoring head: 128 MiB in float32


@dataclass(frozen=True)
class Features:
    """What the vision tower made of one or more prompts' images, in the order of their tokens."""

    kind: type  # the transformers output class to hand back to the model
    pooled: tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...] = ()  # level → images
    is_list: bool = True  # the model expects a list of images, not one tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in a fixed order."""
        return (*self.pooled, *(image for level in self.deepstack for image in level))

    def replaced(self, tensors: Sequence[Tensor]) -> "Features":
        """The same structure over other tensors, given in the order of `tensors`."""
        queue = iter(tensors)
        pooled = tuple(next(queue) for _ in self.pooled)
        return Features(self.kind, pooled, tuple(tuple(next(queue) for _ in lv) for lv in self.deepstack), self.is_list)

    def cut(self, images: slice) -> "Features":
        """Those of some of the images."""
        return Features(self.kind, self.pooled[images], tuple(level[images] for level in self.deepstack), self.is_list)

    def output(self) -> Any:
        """As the model takes it: a new object each time, since models change what they are given."""
        pooled = list(self.pooled) if self.is_list else torch.cat(self.pooled)
        if self.deepstack:
            return self.kind(pooler_output=pooled, deepstack_features=[list(level) for level in self.deepstack])
        return self.kind(pooler_output=pooled)


def join_features(features: Sequence[Features | None]) -> Features | None:
    """Features of a row's prompts as one; prompts without images bring None."""
    present = [f for f in features if f is not None]
    if not present:
        return None
    first = present[0]
    levels = zip(*(f.deepstack for f in present), strict=True)
    return Features(
        first.kind,
        tuple(t for f in present for t in f.pooled),
        tuple(tuple(image for level in same for image in level) for same in levels),
        first.is_list,
    )


class PatchProjection(nn.Conv3d):
    """A convolution that patches reach one by one, each as large as the kernel: then it is a matrix product, which is
    several times faster than torch's convolution.
    """

    def forward(self, input: Float[Tensor, "N c *kernel"]) -> Float[Tensor, "N D *one"]:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


class VLM:
    """A transformers model and its processor, called only through the model's top-level forward.

    The model stays in evaluation mode: dropout would make the importance ratio noise.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        attention: Carrier = "sdpa",
    ) -> None:
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.config = model.config
        self.family: Family = find_family(self.config)
        self.temperature = temperature
        self.autocast = autocast
        self.reference: Any = None
        self.image_token: int | None = getattr(self.config, "image_token_id", None) if self.family.is_vision else None
        ids = [getattr(self.config, name, None) for name in self.family.placeholders]
        self.placeholders = tuple(self.tokenizer.convert_ids_to_tokens([i for i in ids if i is not None]))
        self.eos_ids = _eos_ids(model, self.tokenizer)
        self.forbidden = self._forbidden_ids()  # ids that are never sampled and have probability 0 on both sides
        text = self.config.get_text_config()
        self.window: int | None = text.sliding_window if "sliding_attention" in layer_types(self.config) else None
        # query heads that share a key head
        self._groups = text.num_attention_heads // (
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        )
        if attention.startswith("flash") and self.family.image_sees_itself:
            raise UserError(
                f"attention={attention}: tokens of one image see each other in family {self.config.model_type}, and "
                "variable-length kernels are causal; use attention=sdpa"
            )
        if linear := layer_types(self.config).count("linear_attention"):
            if attention != "levels":
                raise UserError(f"attention={attention}: {LINEAR}; use attention=levels")
            hold_states_over_padding(self.base, linear)
        self.attention: Carrier = attention
        name = IMPLEMENTATIONS[attention]
        self.base.set_attn_implementation({"text_config": name} if self.family.is_vision else name)
        if gradient_checkpointing:
            model.activation_checkpointing_enable()
        self._checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._checkpointing = gradient_checkpointing
        for layer in self._checkpointed if attention == "levels" else ():
            layer._can_checkpoint_with_cache = True  # a LevelCache may be written again
        for module in model.modules():
            if type(module) is nn.Conv3d and module.stride == module.kernel_size and module.groups == 1:
                module.__class__ = PatchProjection
        model.eval()

    # ---- reading a sample ----

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    def prompt(self, sample: Sample, coordinates: bool = False) -> Prompt:
        """The sample as token ids, positions and pixels. `coordinates`: the question holds boxes in original pixels.

        Raises: UserError, naming the sample, for one that cannot be read or that the model cannot take.
        """
        self._check_sample(sample)
        if coordinates and len(sample.images) > 1:
            raise UserError(f"sample {sample.id!r} has {len(sample.images)} images; coordinates are those of one image")
        images = [open_image(image, sample.id) for image in sample.images]
        if images and not self.family.is_vision:
            raise UserError(f"sample {sample.id!r} has images, and model {self.config.model_type} reads text only")
        original: tuple[tuple[int, int], ...] = tuple(image.size for image in images)
        resized = tuple(self._resized(size, sample.id) for size in original)
        question = sample.question
        if coordinates and resized:
            question = to_model(question, self.family.coordinates, original[0], resized[0])
            question = f"{question}\n{instruction(self.family.coordinates, resized[0])}"
        text = self._chat(f"{question}\n{FORMAT}", len(images))
        try:
            ids, pixels = self._tokenize(text, images)
        except ValueError as error:  # of the processor: sizes it refuses, a template without a place for images
            raise UserError(f"sample {sample.id!r}: the model's processor refuses it: {error}") from error
        block = image_blocks(ids, self.image_token)
        return Prompt(sample, text, ids, self._positions(ids, pixels), block, pixels, original, resized)

    def _check_sample(self, sample: Sample) -> None:
        where = f"sample {sample.id!r}"
        if isinstance(sample.images, str) or not isinstance(sample.images, Sequence):
            raise UserError(f"{where}: images is {sample.images!r}; it must be a list, empty for a text-only sample")
        if not isinstance(sample.question, str):
            raise UserError(f"{where}: question is {sample.question!r}; it must be text")
        try:
            sample.question.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: the question is no valid text: {error}") from error
        for token in self.placeholders:
            if token in sample.question:
                raise UserError(
                    f"{where}: the question holds {token!r}, which marks an image's place for this model; leave it "
                    "out, since the places of the sample's images are made by the chat template"
                )

    def _resized(self, size: tuple[int, int], sample_id: str) -> tuple[int, int]:
        try:
            return resized_sizes(self.processor.image_processor, [size])[0]
        except ValueError as error:
            raise UserError(
                f"sample {sample_id!r}: its image of {size[0]}×{size[1]} pixels cannot be resized ({error}); "
                "see on_bad_sample"
            ) from error

    def answer_in_original(self, prompt: Prompt, answer: str) -> str:
        """An answer's boxes and points in pixels of the original image."""
        sizes = prompt.original_sizes[0], prompt.resized_sizes[0]
        return to_original(answer, self.family.coordinates, *sizes)

    def answer_in_model(self, prompt: Prompt, answer: str) -> str:
        """A reference answer's boxes and points in the model's coordinates."""
        sizes = prompt.original_sizes[0], prompt.resized_sizes[0]
        return to_model(answer, self.family.coordinates, *sizes)

    def _chat(self, question: str, num_images: int) -> str:
        if self.tokenizer.chat_template is None and getattr(self.processor, "chat_template", None) is None:
            return f"{question}\n{THOUGHT_OPEN}"
        content: Any = question
        if self.family.is_vision:
            content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text if text.rstrip().endswith(THOUGHT_OPEN) else text + THOUGHT_OPEN

    def _tokenize(self, text: str, images: Sequence[Image.Image]) -> tuple[Int[Tensor, " P"], dict[str, Tensor]]:
        special = self.tokenizer.chat_template is None and not self.family.is_vision
        if not images:
            return self.tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"][0], {}
        inputs = self.processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt")
        return inputs["input_ids"][0], {k: inputs[k] for k in self.family.vision_inputs if k in inputs}

    def _positions(self, ids: Int[Tensor, " P"], pixels: Mapping[str, Tensor]) -> Int[Tensor, "R P"]:
        if self.family.positions == "arange":
            return torch.arange(len(ids))[None]
        if not pixels:
            return torch.arange(len(ids)).expand(3, -1)
        of_image = (ids == self.image_token).int()[None]
        inner = self.base.model
        return inner.get_rope_index(ids[None], image_grid_thw=pixels["image_grid_thw"], mm_token_type_ids=of_image)[0][
            :, 0
        ]

    # ---- the tower ----

    @property
    def base(self) -> Any:
        """The transformers model itself, inside an adapter wrapper if there is one."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def tower_trains(self) -> bool:
        """A weight that image features depend on is trainable, so features of the rollout are stale after a step."""
        prefixes = self.family.vision_modules
        return (
            any(p.requires_grad and n.startswith(prefixes) for n, p in self.base.named_parameters())
            if prefixes
            else False
        )

    def encode(self, prompts: Sequence[Prompt]) -> list[Features | None]:
        """Image features of each prompt, every image through the tower once; None for a prompt without images.

        Prompts share calls of the tower where the family allows it, up to PIXEL_ROWS rows of pixels a call.
        """
        encoded: list[Features | None] = [None] * len(prompts)
        batch: list[int] = []
        rows = 0
        for index, prompt in enumerate(prompts):
            if not prompt.pixels:
                continue
            count = len(prompt.pixels["pixel_values"])
            if batch and (not self.family.joint_images or rows + count > PIXEL_ROWS):
                self._encode_batch(prompts, batch, encoded)
                batch, rows = [], 0
            batch.append(index)
            rows += count
        if batch:
            self._encode_batch(prompts, batch, encoded)
        return encoded

    def _encode_batch(self, prompts: Sequence[Prompt], batch: list[int], encoded: list[Features | None]) -> None:
        names = prompts[batch[0]].pixels
        pixels = {n: torch.cat([prompts[i].pixels[n] for i in batch]).to(self.device) for n in names}
        with self._updating(), self._autocast():
            out = self.base.get_image_features(**pixels)
        is_list = isinstance(out.pooler_output, list | tuple)
        levels = out.get("deepstack_features") or ()
        start = 0
        for i in batch:
            if is_list:  # one tensor per image; where prompts go one by one, all of them are this prompt's
                count = len(prompts[i].original_sizes) if len(batch) > 1 else len(out.pooler_output)
                pooled = tuple(out.pooler_output[start : start + count])
            else:  # one row per tile, as there are rows of pixels
                count = len(prompts[i].pixels["pixel_values"]) if len(batch) > 1 else len(out.pooler_output)
                pooled = (out.pooler_output[start : start + count],)
            deepstack = tuple(tuple(level[start : start + count]) for level in levels)
            encoded[i] = Features(type(out), pooled, deepstack, is_list)
            start += count

    # ---- forward on a cache ----

    def logits(
        self,
        ids: Int[Tensor, "B L"],
        position_ids: Int[Tensor, "R B L"],
        seen: Bool[Tensor, "G C S"],
        distance: Int[Tensor, "G C S"] | None,
        cache: Cache,
        keep: Int[Tensor, " k"],
        features: Features | None = None,
        fold: Fold | None = None,
    ) -> Float[Tensor, "B k V"]:
        """Logits at the positions `keep` of L new tokens, whose keys and values the cache stores as it sees fit.

        With a `fold`, `seen` and `distance` are those of its grid.
        """
        with self._autocast():
            return self.model(
                input_ids=ids,
                position_ids=position_ids if len(position_ids) > 1 else position_ids[0],
                attention_mask=self._mask(seen, distance),
                cache=cache,
                use_cache=True,
                logits_to_keep=keep,
                **({} if fold is None else {"tree": fold}),
                **_encoder_outputs(features),
            ).logits

    def prompt_mask(self, prompt: Prompt) -> tuple[Bool[Tensor, "P P"], Int[Tensor, "P P"]]:
        """Which tokens of a prompt each of them sees, and their distances along the path."""
        path = torch.arange(len(prompt.ids), device=self.device)
        distance = path[:, None] - path
        return self._with_images(distance >= 0, prompt.image_block.to(self.device)), distance

    def _with_images(self, seen: Bool[Tensor, "N N"], block: Int[Tensor, " N"]) -> Bool[Tensor, "N N"]:
        if not self.family.image_sees_itself:
            return seen
        return seen | ((block[:, None] == block) & (block >= 0))

    def _mask(self, seen: Bool[Tensor, "B L S"], distance: Int[Tensor, "B L S"] | None) -> Any:
        """What is added to attention scores, in the form the family takes: the L queries once for each query head that
        shares a key head. `distance` may be left out where no layer has a window.
        """

        def form(mask: Bool[Tensor, "B L S"]) -> Float[Tensor, "B 1 GL S"]:
            return additive(mask.repeat(1, self._groups, 1) if self._groups > 1 else mask, self.arithmetic)[:, None]

        full = form(seen)
        if self.window is not None:
            assert distance is not None, f"layers with a window of {self.window} need distances"
            return {"full_attention": full, "sliding_attention": form(seen & (distance < self.window))}
        return {"full_attention": full} if self.family.mask == "dict" else full

    # ---- scoring a packed row ----

    def logprobs(self, pack: TreePack, features: Features | None) -> Float[Tensor, " Q"]:
        """log π(target | its branch) of the Q scored tokens, differentiable, from one pass over the packed row, or
        one over each of its levels.
        """
        return self._score(pack, features, self._score_chunk)

    def logprobs_and_entropies(
        self, pack: TreePack, features: Features | None
    ) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
        """The same, and the entropies of the distributions that the targets are of, differentiable too."""
        logprobs, entropies = self._score(pack, features, self._score_chunk_with_entropy).unbind(-1)
        return logprobs, entropies

    def _score(self, pack: TreePack, features: Features | None, chunk: "ScoreChunk") -> Float[Tensor, "Q *two"]:
        lengths = tuple(torch.bincount(pack.segment, minlength=len(pack.parents)).tolist())
        if self.attention == "levels":
            return self._score_by_levels(pack, lengths, features, chunk)
        pack = pack.to(self.device)
        image = pack.image_block if self.family.image_sees_itself else None
        layout = TreeLayout(pack.parents, lengths, pack.segment, pack.path, image)
        nothing = torch.zeros((1, 0, 0), dtype=torch.bool, device=self.device)
        with self._updating(), self._autocast(), self._scoring(pack.targets, chunk):
            return self.model(
                input_ids=pack.input_ids[None],
                position_ids=pack.position_ids[:, None] if len(pack.position_ids) > 1 else pack.position_ids,
                attention_mask=self._mask(nothing, nothing.long()),  # the layout tells
                use_cache=False,
                logits_to_keep=pack.predictor,
                tree=layout,
                **_encoder_outputs(features),
            ).logits[0]

    def _score_by_levels(
        self, pack: TreePack, lengths: Sequence[int], features: Features | None, chunk: "ScoreChunk"
    ) -> Float[Tensor, "Q *two"]:
        plan = plan_levels(pack.parents, lengths).to(self.device)
        pack = pack.to(self.device)
        images = _features_by_prompt(features, pack.prompts)
        head = self.base.get_output_embeddings()

        def forward(batch: LevelBatch, cache: LevelCache) -> Float[Tensor, "B L D"]:
            positions = pack.position_ids[:, batch.tokens]
            is_prompt = batch.fold is None
            seen = (
                self._with_images(batch.seen[0], pack.image_block[batch.tokens[0]])[None] if is_prompt else batch.seen
            )
            with _replaced_forward(head, lambda hidden: hidden):
                return self.model(
                    input_ids=pack.input_ids[batch.tokens],
                    position_ids=positions if len(positions) > 1 else positions[0],
                    attention_mask=self._mask(seen, batch.distance),
                    cache=cache,
                    use_cache=False,  # the cache is given; a new one is not asked for
                    tree=batch.fold,
                    **_encoder_outputs(next(images) if is_prompt else None),
                ).logits

        with self._updating(), self._autocast():
            hidden = run_levels(plan, forward)
            with self._scoring(pack.targets, chunk):
                return head(hidden[pack.predictor][None])[0]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, `logprobs` are those of the frozen start: the adapter switched off, or a frozen copy of the
        weights.
        """
        if isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                yield
            return
        assert self.reference is not None, "no reference model was kept; call keep_reference() before training"
        trained, self.model = self.model, self.reference
        try:
            yield
        finally:
            self.model = trained

    def keep_reference(self) -> None:
        """Keep a frozen copy of the present weights as the reference; with an adapter nothing is copied."""
        if not isinstance(self.model, PeftModel):
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def mix_reference(self, alpha: float) -> None:
        """Move the kept reference towards the present weights: reference + alpha * (policy - reference)."""
        assert self.reference is not None, "no reference model was kept; call keep_reference() before training"
        for reference, weight in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            reference.lerp_(weight, alpha)

    @property
    def arithmetic(self) -> torch.dtype:
        """In which matrices are multiplied."""
        return self.autocast or self.base.get_input_embeddings().weight.dtype

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Gradient checkpointing asks for training mode of the layers that it wraps; what is inside them stays as it
        is.
        """
        active = self._checkpointing and torch.is_grad_enabled()
        for layer in self._checkpointed if active else ():
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed if active else ():
                layer.training = False

    @contextmanager
    def _scoring(self, targets: Int[Tensor, " Q"], chunk: "ScoreChunk") -> Iterator[None]:
        """Inside, the output head gives what `chunk` makes of the logits and targets, (1, Q) log-probabilities say,
        instead of (1, Q, V) logits.

        The head runs inside the model's forward, so that wrappers around it still hold, and the logits of one chunk are
        all that ever exists.
        """
        head = self.base.get_output_embeddings()
        plain = head.forward

        def score(hidden: Float[Tensor, "1 Q D"]) -> Float[Tensor, "1 Q *two"]:
            size = max(1, LOGIT_ELEMENTS // head.weight.shape[0])
            parts = list(zip(hidden[0].split(size), targets.split(size), strict=True))
            if len(parts) == 1 or not torch.is_grad_enabled():
                return torch.cat([chunk(plain, *part) for part in parts])[None]
            return torch.cat([checkpoint(chunk, plain, *part, use_reentrant=False) for part in parts])[None]

        with _replaced_forward(head, score):
            yield

    def _score_chunk(
        self, head: Callable[[Tensor], Tensor], hidden: Float[Tensor, "q D"], targets: Int[Tensor, " q"]
    ) -> Float[Tensor, " q"]:
        return -F.cross_entropy(self.policy_logits(head(hidden)), targets, reduction="none")

    def _score_chunk_with_entropy(
        self, head: Callable[[Tensor], Tensor], hidden: Float[Tensor, "q D"], targets: Int[Tensor, " q"]
    ) -> Float[Tensor, "q 2"]:
        logprobs = self.policy_logits(head(hidden)).log_softmax(-1)
        possible = logprobs.masked_fill(logprobs.isneginf(), 0.0)  # a forbidden token adds neither value nor gradient
        entropies = -(logprobs.exp() * possible).sum(-1)
        return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], entropies], dim=-1)

    def policy_logits(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Logits of the distribution the policy is: tempered, without forbidden ids; at least float32."""
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        logits = logits / self.temperature if self.temperature != 1.0 else logits
        return logits.index_fill(-1, self.forbidden.to(logits.device), -torch.inf)

    def _forbidden_ids(self) -> Int[Tensor, " f"]:
        vocabulary = self.base.get_output_embeddings().weight.shape[0]
        known = len(self.tokenizer)
        ids = {getattr(self.config, name, None) for name in self.family.placeholders} | {self.tokenizer.pad_token_id}
        added = self.tokenizer.get_added_vocab()
        ids |= {added.get(token) for token in self.family.placeholder_tokens}
        wanted = {i for i in ids if i is not None} - self.eos_ids | set(range(known, vocabulary))
        return torch.tensor(sorted(i for i in wanted if i < vocabulary), dtype=torch.long)


# The output head, hidden states and targets to what is wanted of each target
ScoreChunk = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    plain = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = plain


def open_image(image: Any, sample_id: str) -> Image.Image:
    """The image in RGB. Raises UserError naming sample and file where it cannot be read or has no pixels."""
    where = f"sample {sample_id!r}: the image {image}"
    if not isinstance(image, Image.Image | str | Path):
        raise UserError(f"{where} is a {type(image).__name__}; it must be a path or a PIL image")
    try:
        if isinstance(image, Image.Image):
            pixels = image.convert("RGB")
        else:
            with Image.open(image) as opened:
                pixels = opened.convert("RGB")
    # Pillow's readers of single formats raise all of these for corrupt files
    except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError) as error:
        raise UserError(f"{where} cannot be read ({error}); see on_bad_sample") from error
    if 0 in pixels.size:
        raise UserError(f"{where} has {pixels.width}×{pixels.height} pixels; see on_bad_sample")
    return pixels


def _eos_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("model: neither the generation config nor the tokenizer names an end-of-sequence id")
    return frozenset(ids)


def _encoder_outputs(features: Features | None) -> dict[str, Any]:
    return {} if features is None else {"mm_encoder_outputs": {"image": features.output()}}


def _features_by_prompt(features: Features | None, prompts: Sequence[Prompt]) -> Iterator[Features | None]:
    """What `join_features` joined, prompt by prompt, by the number of image tokens."""
    taken = 0
    for prompt in prompts:
        first, missing = taken, int((prompt.image_block >= 0).sum())
        while missing > 0:
            assert features is not None, "a prompt has image tokens, and there are no features"
            missing -= features.pooled[taken].shape[:-1].numel()
            taken += 1
        assert missing == 0, "image features and image tokens do not match"
        own = slice(first, taken)
        yield None if first == taken else features.cut(own)  # type: ignore[union-attr]
