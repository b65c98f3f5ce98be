"""The gradient of one packed row of trees: pack, log-probabilities, loss, backward.

Letters: Q sampled tokens of the row.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.algorithm.minibatch import ObjectiveConfig, Prepared, row_loss
from vlm_grpo.common.errors import UserError
from vlm_grpo.model.features import Features, join_features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.tree.pack import TreePack, pack


class RowUpdate:
    """Adds the gradients of rows to the weights. It owns the state of two checks, each of which is made once in a
    run.
    """

    def __init__(self, vlm: VLM, config: ObjectiveConfig) -> None:
        self.vlm, self.config = vlm, config
        self.tower_trains = vlm.tower_trains
        self._agreed = self._sighted = False

    def backward(self, row: Prepared, on_policy: bool) -> dict[str, Tensor]:
        """Add the row's share of the minibatch's gradient; returns its sums over tokens and its share of the loss.

        `on_policy`: the weights have not changed since the rollout.
        """
        features = self._features(row, on_policy)
        packed = pack(row.segments).to(self.vlm.device)
        ref_logprobs = self._ref_logprobs(packed, features)
        entropies = None
        if self.config.entropy_coef > 0:
            logprobs, entropies = self.vlm.logprobs_and_entropies(packed, features)
        else:
            logprobs = self.vlm.logprobs(packed, features)
        if on_policy and not self._agreed:
            self._check_agreement(logprobs.detach(), packed)
        if features is not None and not self._sighted:
            self._check_sight(logprobs.detach(), packed)
        loss = row_loss(packed, logprobs, ref_logprobs, entropies, row.num_entropies, self.config)
        loss.loss.backward()
        return {**loss.sums, "loss": loss.loss.detach()}

    def _features(self, row: Prepared, on_policy: bool) -> Features | None:
        """Image features of the row. A trainable vision tower encodes the images again, with an autograd graph, unless
        the graph of the rollout was kept and the weights are the same. A prompt is in one row, so each image is
        encoded once per update.
        """
        if not self.tower_trains or (on_policy and row.is_kept):
            return join_features([g.features for g in row.graded])
        return join_features(self.vlm.encode([g.scored.tree.prompt for g in row.graded]))

    @torch.no_grad()
    def _ref_logprobs(self, packed: TreePack, features: Features | None) -> Float[Tensor, " Q"] | None:
        """Log-probabilities under the reference, with its own vision tower; None if the loss has no KL penalty."""
        if not (self.config.beta > 0 and self.config.kl_in == "loss"):
            return None
        with self.vlm.as_reference():
            seen = join_features(self.vlm.encode(packed.prompts)) if self.tower_trains else features
            return self.vlm.logprobs(packed, seen)

    def _check_agreement(self, logprobs: Float[Tensor, " Q"], packed: TreePack) -> None:
        """Check, before the first update, that rollout and update agree on the log-probabilities."""
        self._agreed = True
        gap = float((logprobs - packed.old_logprobs).abs().max())
        exact = self.vlm.autocast is None and logprobs.dtype == torch.float32
        assert not exact or gap < 1e-2, (
            f"log-probabilities of rollout and update differ by {gap}: the tree rule is broken"
        )

    def _check_sight(self, logprobs: Float[Tensor, " Q"], packed: TreePack) -> None:
        """Check, for the first row with an image, that inverted images change the log-probabilities."""
        self._sighted = True
        negatives = [replace(p, pixels=_negative(p.pixels)) for p in packed.prompts]
        with torch.no_grad():
            others = self.vlm.logprobs(packed, join_features(self.vlm.encode(negatives)))
        if torch.equal(others, logprobs):
            raise UserError(
                "the log-probabilities do not change when the image does: the model does not look at its images. Check "
                "that `model` is a vision-language checkpoint whose tower and projector were trained"
            )


def _negative(pixels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: -value if name == "pixel_values" else value for name, value in pixels.items()}
