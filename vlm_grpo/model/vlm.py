"""The model, one class for every family: it encodes images, decodes on a cache and computes log-probabilities of trees.

Letters: B rows, L new tokens per row, S keys, P prompt tokens, N packed positions, Q sampled tokens, V vocabulary, D
hidden, R rows of rotary positions, G rows and C queries of the grid that attention sees: B and L without a fold.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from vlm_grpo.common.errors import UserError
from vlm_grpo.model.attention import IMPLEMENTATIONS, Backend, Fold
from vlm_grpo.model.backend import LINEAR
from vlm_grpo.model.families import Family, find_family, layer_types
from vlm_grpo.model.features import Features, encoder_outputs, features_by_prompt
from vlm_grpo.model.head import (
    TargetValues,
    end_ids,
    forbidden_ids,
    head_gives,
    replaced_forward,
    target_logprobs,
    target_logprobs_and_entropies,
)
from vlm_grpo.model.levels import LevelBatch, LevelCache, plan_levels, run_levels
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.model.states import hold_states_over_padding
from vlm_grpo.model.tower import PatchProjection, encode_images
from vlm_grpo.tree.layout import TreeLayout, additive
from vlm_grpo.tree.pack import TreePack
from vlm_grpo.tree.types import Prompt


class VLM:
    """A transformers model and its processor. The model is only called through its top-level forward.

    It stays in evaluation mode, since dropout would add noise to the importance ratio.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        attention: Backend = "sdpa",
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
        self.eos_ids = end_ids(model, self.tokenizer)
        vocabulary = self.base.get_output_embeddings().weight.shape[0]
        # ids with probability 0, in sampling and in the update
        self.forbidden = forbidden_ids(self.family, self.config, self.tokenizer, self.eos_ids, vocabulary)
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
        self.attention: Backend = attention
        name = IMPLEMENTATIONS[attention]
        self.base.set_attn_implementation({"text_config": name} if self.family.is_vision else name)
        if gradient_checkpointing:
            model.activation_checkpointing_enable()
        self._checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._checkpointing = gradient_checkpointing
        for layer in self._checkpointed if attention == "levels" else ():
            layer._can_checkpoint_with_cache = True  # writing a LevelCache again changes nothing
        for module in model.modules():
            if type(module) is nn.Conv3d and module.stride == module.kernel_size and module.groups == 1:
                module.__class__ = PatchProjection
        model.eval()

    @property
    def processor(self) -> Any:
        """The processor that turns samples into prompts; for a text-only model, its tokenizer."""
        return self.prompts.processor

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; for a text-only model, the processor itself."""
        return self.prompts.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def base(self) -> Any:
        """The transformers model itself, without the wrapper that LoRA adapters add."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    # ---- the vision tower ----

    @property
    def tower_trains(self) -> bool:
        """Whether weights of the vision tower train, so that image features of the rollout are stale after a step."""
        prefixes = self.family.vision_modules
        return (
            any(p.requires_grad and n.startswith(prefixes) for n, p in self.base.named_parameters())
            if prefixes
            else False
        )

    def encode(self, prompts: Sequence[Prompt]) -> list[Features | None]:
        """Image features of each prompt, every image through the tower once; None for a prompt without images."""
        return encode_images(self._tower, prompts, self.family.joint_images)

    def _tower(self, pixels: Mapping[str, Tensor]) -> Any:
        """The vision tower's output for some prompts' pixels."""
        with self._updating(), self._autocast():
            return self.base.get_image_features(**{name: x.to(self.device) for name, x in pixels.items()})

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
        """Logits at the positions `keep` of L new tokens, whose keys and values go into the cache.

        `seen` says which keys each query sees, `distance` how far they lie apart on the path. Both cover the tokens, or
        the grid of queries if a `fold` is given.
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
        """Which tokens of a prompt each of its tokens sees, and their distances along the path."""
        path = torch.arange(len(prompt.ids), device=self.device)
        distance = path[:, None] - path
        return self._with_images(distance >= 0, prompt.image_block.to(self.device)), distance

    def _with_images(self, seen: Bool[Tensor, "N N"], block: Int[Tensor, " N"]) -> Bool[Tensor, "N N"]:
        if not self.family.image_sees_itself:
            return seen
        return seen | ((block[:, None] == block) & (block >= 0))

    def _mask(self, seen: Bool[Tensor, "B L S"], distance: Int[Tensor, "B L S"] | None) -> Any:
        """The mask that is added to attention scores, in the form that the family takes.

        The L queries are repeated for each query head that shares a key head. `distance` is needed only if some layers
        have a window.
        """

        def form(mask: Bool[Tensor, "B L S"]) -> Float[Tensor, "B 1 GL S"]:
            return additive(mask.repeat(1, self._groups, 1) if self._groups > 1 else mask, self.arithmetic)[:, None]

        full = form(seen)
        if self.window is not None:
            assert distance is not None, f"layers with a window of {self.window} need distances"
            return {"full_attention": full, "sliding_attention": form(seen & (distance < self.window))}
        return {"full_attention": full} if self.family.mask == "dict" else full

    # ---- log-probabilities of a packed row ----

    def logprobs(self, pack: TreePack, features: Features | None) -> Float[Tensor, " Q"]:
        """log π(target | its branch) of the Q sampled tokens of a packed row, differentiable.

        One pass over the packed row; under attention=levels one pass over each batch of each depth.
        """
        return self._target_values(pack, features, target_logprobs)

    def logprobs_and_entropies(
        self, pack: TreePack, features: Features | None
    ) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
        """The same log-probabilities, and the entropy of the distribution before each target, differentiable too."""
        logprobs, entropies = self._target_values(pack, features, target_logprobs_and_entropies).unbind(-1)
        return logprobs, entropies

    def _target_values(
        self, pack: TreePack, features: Features | None, values: TargetValues
    ) -> Float[Tensor, "Q *two"]:
        lengths = tuple(torch.bincount(pack.segment, minlength=len(pack.parents)).tolist())
        if self.attention == "levels":
            return self._target_values_by_depth(pack, lengths, features, values)
        pack = pack.to(self.device)
        image = pack.image_block if self.family.image_sees_itself else None
        layout = TreeLayout(pack.parents, lengths, pack.segment, pack.path, image)
        nothing = torch.zeros((1, 0, 0), dtype=torch.bool, device=self.device)
        with self._updating(), self._autocast(), self._head_gives(pack.targets, values):
            return self.model(
                input_ids=pack.input_ids[None],
                position_ids=pack.position_ids[:, None] if len(pack.position_ids) > 1 else pack.position_ids,
                attention_mask=self._mask(nothing, nothing.long()),  # empty: attention follows the layout
                use_cache=False,
                logits_to_keep=pack.predictor,
                tree=layout,
                **encoder_outputs(features),
            ).logits[0]

    def _target_values_by_depth(
        self, pack: TreePack, lengths: Sequence[int], features: Features | None, values: TargetValues
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
            with replaced_forward(head, lambda hidden: hidden):
                return self.model(
                    input_ids=pack.input_ids[batch.tokens],
                    position_ids=positions if len(positions) > 1 else positions[0],
                    attention_mask=self._mask(seen, batch.distance),
                    cache=cache,
                    use_cache=False,  # no new cache besides the given one
                    tree=batch.fold,
                    **encoder_outputs(next(images) if is_prompt else None),
                ).logits

        with self._updating(), self._autocast():
            hidden = run_levels(plan, forward)
            with self._head_gives(pack.targets, values):
                return head(hidden[pack.predictor][None])[0]

    def _head_gives(self, targets: Int[Tensor, " Q"], values: TargetValues) -> AbstractContextManager[None]:
        return head_gives(self.base.get_output_embeddings(), targets, self.policy_logits, values)

    def policy_logits(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Logits of the policy's distribution: divided by the temperature, -∞ for forbidden ids, at least float32."""
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        logits = logits / self.temperature if self.temperature != 1.0 else logits
        return logits.index_fill(-1, self.forbidden.to(logits.device), -torch.inf)

    # ---- the reference ----

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, log-probabilities are the reference's: with the adapter switched off, or with the kept copy."""
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
        """Keeps a frozen copy of the present weights as the reference; with an adapter it copies nothing."""
        if not isinstance(self.model, PeftModel):
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def mix_reference(self, alpha: float) -> None:
        """Moves the kept reference towards the present weights: reference + alpha * (policy - reference)."""
        assert self.reference is not None, "no reference model was kept; call keep_reference() before training"
        for reference, weight in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            reference.lerp_(weight, alpha)

    # ---- precision and checkpointing ----

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype in which matrices are multiplied."""
        return self.autocast or self.base.get_input_embeddings().weight.dtype

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Inside, the layers that gradient checkpointing wraps are in training mode, which it needs.

        Modules within these layers stay in evaluation mode.
        """
        active = self._checkpointing and torch.is_grad_enabled()
        for layer in self._checkpointed if active else ():
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed if active else ():
                layer.training = False
