"""The model: encode images, read prompts, decode on a shared cache, score packed rows. One class for every family.

Letters: B rows, L new tokens per row, S keys, P prompt tokens, N packed positions, Q scored tokens, V vocabulary, D
hidden, R rows of rotary positions, G rows and C queries of the grid that attention sees: B and L without a fold.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.attention import IMPLEMENTATIONS, Carrier, Fold
from vlm_grpo.model.backend import LINEAR
from vlm_grpo.model.families import Family, find_family, layer_types
from vlm_grpo.model.features import Features, encoder_outputs, features_by_prompt
from vlm_grpo.model.levels import LevelBatch, LevelCache, plan_levels, run_levels
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.model.states import hold_states_over_padding
from vlm_grpo.tree.layout import TreeLayout, additive
from vlm_grpo.tree.pack import TreePack
from vlm_grpo.tree.types import Prompt

PIXEL_ROWS = 2**14  # patches (or tiles) of one call of the vision tower
LOGIT_ELEMENTS = 2**25  # of one chunk of the scoring head: 128 MiB in float32


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
        self.config = model.config
        self.family: Family = find_family(self.config)
        self.temperature = temperature
        self.autocast = autocast
        self.reference: Any = None
        has_own_positions = self.family.positions != "arange"
        self.prompts = PromptBuilder(
            processor, self.config, self.base.model.get_rope_index if has_own_positions else None
        )
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

    @property
    def processor(self) -> Any:
        """What samples are read by."""
        return self.prompts.processor

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer; of a model that reads text only, the processor itself."""
        return self.prompts.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

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
                **encoder_outputs(features),
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
                **encoder_outputs(features),
            ).logits[0]

    def _score_by_levels(
        self, pack: TreePack, lengths: Sequence[int], features: Features | None, chunk: "ScoreChunk"
    ) -> Float[Tensor, "Q *two"]:
        plan = plan_levels(pack.parents, lengths).to(self.device)
        pack = pack.to(self.device)
        images = features_by_prompt(features, pack.prompts)
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
                    **encoder_outputs(next(images) if is_prompt else None),
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


def _eos_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    ids = [ids] if isinstance(ids, int) else list(ids or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("model: neither the generation config nor the tokenizer names an end-of-sequence id")
    return frozenset(ids)
