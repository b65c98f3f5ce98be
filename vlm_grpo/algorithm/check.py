"""Rules between options: refuse combinations that have no meaning, do nothing or leave nothing to learn from.

The range of a single option stands beside it (`Range`). Each rule here concerns several options and names them all.
"""

import math
from collections.abc import Mapping

from vlm_grpo.algorithm.advantage import AdvantageConfig
from vlm_grpo.algorithm.minibatch import ObjectiveConfig
from vlm_grpo.algorithm.objectives import OBJECTIVES, LossConfig, clip_range, clipped
from vlm_grpo.algorithm.optim import OptimConfig
from vlm_grpo.algorithm.trainer import StepConfig
from vlm_grpo.common.config import refuse_idle
from vlm_grpo.common.errors import UserError
from vlm_grpo.model.load import ModelConfig


def check(config: StepConfig) -> None:
    """Raise UserError if a training step cannot run with these options, or would not do what they say.

    Ranges are not checked again: `load_config` checks those of options that a user gives, `check_ranges` those of a
    configuration made in Python.
    """
    _check_advantage(config)
    _check_comparison(config)
    _check_clip(config)
    _check_kl(config)
    _check_shaping(config)
    _check_branching(config)
    _check_reference(config)
    _check_diagnostics(config)
    check_schedule(config, config.max_steps)
    if config.loss_type == "gpg" and config.num_iterations > 1:
        raise UserError(
            f"num_iterations={config.num_iterations} with loss_type=gpg: after the first pass the rollouts are another "
            "policy's, and this loss has no ratio to make up for it: use num_iterations=1, or loss_type=dapo or cispo"
        )
    if config.mask_truncated_completions and config.ignore_eos:
        raise UserError("mask_truncated_completions=true with ignore_eos=true leaves nothing to train: all are cut")


def check_schedule(config: OptimConfig, max_steps: int) -> None:
    """Raise UserError if the run would end before its warm-up."""
    if config.warmup_steps >= max_steps:
        raise UserError(
            f"warmup_steps={config.warmup_steps} with max_steps={max_steps}: the run would end before its learning "
            "rate has risen: lower warmup_steps or raise max_steps"
        )


def check_model(config: ModelConfig) -> None:
    """Raise UserError if options of the model contradict each other or do nothing."""
    if config.lora_r == 0:
        refuse_idle(config, ["lora_alpha"], "with lora_r=0, which trains the weights themselves: give lora_r")
    least, most = config.min_pixels, config.max_pixels
    if least is not None and most is not None and least > most:
        raise UserError(f"min_pixels={least} is more than max_pixels={most}")


def check_adapter(config: StepConfig, lora_r: int) -> None:
    """Raise UserError if the reference should move, but is the model without its adapter."""
    if config.sync_ref_model and lora_r > 0:
        raise UserError(
            f"sync_ref_model=true with an adapter (lora_r={lora_r}): there the reference is the model without its "
            "adapter, which cannot move: set lora_r=0 or sync_ref_model=false"
        )


def _check_comparison(config: StepConfig) -> None:
    if config.credit == "sequence":
        reason = "with credit=sequence, where thought and answer are one: there is no thoughts' term beside theirs"
        refuse_idle(config, ["answer_weight"], reason)
    is_alone = config.num_thoughts == 1 and config.num_levels == 2 and config.advantage != "reinforce"
    if is_alone and (config.num_answers == 1 or config.answer_weight == 0):
        other = "num_answers=1" if config.num_answers == 1 else "answer_weight=0"
        raise UserError(
            f"num_thoughts=1 with {other} leaves nothing to compare: raise one of them, or set advantage=reinforce"
        )


def _check_advantage(config: ObjectiveConfig) -> None:
    if config.advantage == "reinforce_pp" and config.scale_rewards == "none":
        raise UserError(
            "scale_rewards=none with advantage=reinforce_pp, which divides by the standard deviation over the step: "
            "advantage=mean is the same without it"
        )
    if config.num_levels > 2:
        _check_siblings(config)
    elif config.answer_baseline == "thought":
        _check_baseline_of_thought(config)
    if config.credit == "sequence" and config.advantage == "grpo_ma" and config.num_answers > 1:
        raise UserError(
            f"credit=sequence with advantage=grpo_ma and num_answers={config.num_answers}: GRPO-MA has an advantage of "
            "the thought, and here a thought has none of its own: use advantage=grpo, or credit=segment"
        )


def _check_baseline_of_thought(config: ObjectiveConfig) -> None:
    if config.num_answers == 1:
        raise UserError(
            "answer_baseline=thought with num_answers=1 compares every answer with itself and trains none: "
            "use answer_baseline=prompt or num_answers=2 or more"
        )
    reasons = {
        "credit=sequence": "which compares whole sequences of a prompt: no answer has a baseline of its own",
        "advantage=grpo": "which gives a thought the mean of its answers' advantages, and that is then always 0",
        "advantage=reinforce": "which has no baseline",
    }
    _refuse_with(config, "answer_baseline=thought", reasons, "use answer_baseline=prompt")


def _check_siblings(config: ObjectiveConfig) -> None:
    reasons = {
        "credit=sequence": "which gives a whole path one advantage, and no piece of a thought one among its siblings",
        "advantage=grpo": "which gives a thought the mean of its answers' advantages, not one among its siblings",
        "advantage=reinforce": "which compares nothing, so that a piece is worth the same with siblings and without",
    }
    remedy = "use credit=segment and advantage=grpo_ma, mean, rloo, reinforce_pp or gpg, or num_levels=2"
    _refuse_with(config, f"num_levels={config.num_levels}", reasons, remedy)
    if config.num_answers == 1 and config.answer_baseline != "prompt":
        raise UserError(
            f"num_levels={config.num_levels} with num_answers=1 and answer_baseline={config.answer_baseline} compares "
            "every answer with itself and trains none: use num_answers=2 or more, or answer_baseline=prompt"
        )


def _refuse_with(config: AdvantageConfig, option: str, reasons: Mapping[str, str], remedy: str) -> None:
    """Raise UserError if credit or advantage has one of the values that have no meaning together with `option`."""
    for value in (f"credit={config.credit}", f"advantage={config.advantage}"):
        if value in reasons:
            raise UserError(f"{option} with {value}, {reasons[value]}: {remedy}")


def _check_clip(config: LossConfig) -> None:
    clips = OBJECTIVES[config.loss_type].token_loss is clipped
    if config.loss_type in ("sapo", "gpg"):
        refuse_idle(config, ["epsilon_high"], f"with loss_type={config.loss_type}, which clips nothing")
    if config.loss_type != "sapo":
        names = ("sapo_temperature_pos", "sapo_temperature_neg")
        refuse_idle(config, names, f"with loss_type={config.loss_type}, which has no soft gate")
    if config.loss_type == "cispo" and config.epsilon_high is not None and config.epsilon_high < 1:
        raise UserError(
            f"epsilon_high={config.epsilon_high} with loss_type=cispo: there it is the cap of the ratio itself, and "
            "below 1 it would shrink every token's share: give 1 or more, as 5"
        )
    if config.delta is None:
        return
    if not clips:
        raise UserError(f"delta={config.delta} with loss_type={config.loss_type}, which has no clip that it could end")
    _, high = clip_range(config)
    if not high < config.delta < math.inf:
        raise UserError(f"delta={config.delta}: must be above 1 + epsilon_high = {high:g}, where the clip ends")


def _check_kl(config: LossConfig) -> None:
    if config.beta == 0:
        refuse_idle(config, ["use_bias_correction_kl"], "with beta=0: there is no KL penalty")
    if config.kl_in == "reward" and config.beta == 0:
        raise UserError("kl_in=reward with beta=0 penalises nothing: give beta")
    if config.kl_in == "reward" and config.use_bias_correction_kl:
        raise UserError(
            "use_bias_correction_kl=true with kl_in=reward: a reward is of the policy that sampled, so its ratio is 1"
        )
    if config.beta > 0 and (config.kl_in, config.kl_estimator) == ("loss", "k1") and not config.use_bias_correction_kl:
        raise UserError(
            "kl_estimator=k1 with kl_in=loss: its gradient, that of log π, is 0 on average and pulls nothing back: use "
            "k2 or k3, or kl_in=reward, or use_bias_correction_kl=true"
        )


def _check_shaping(config: ObjectiveConfig) -> None:
    cache, max_length = config.soft_punish_cache, config.max_thought_length + config.max_answer_length
    if cache is not None and cache > max_length:
        raise UserError(
            f"soft_punish_cache={cache}: must be from 1 to max_thought_length + max_answer_length = {max_length}"
        )
    if config.dynamic_sampling != "resample":
        refuse_idle(config, ["max_resamples"], f"with dynamic_sampling={config.dynamic_sampling}")
    if config.dynamic_sampling != "none" and config.advantage == "reinforce":
        raise UserError(
            f"dynamic_sampling={config.dynamic_sampling} with advantage=reinforce, which has no baseline: equal "
            "rewards teach as much as others"
        )
    if config.dynamic_sampling == "drop" and config.advantage == "gpg":
        raise UserError(
            "dynamic_sampling=drop with advantage=gpg, which makes up for prompts of equal rewards by its own factor: "
            "with advantage=mean they are dropped"
        )


def _check_branching(config: ObjectiveConfig) -> None:
    if config.num_levels == 2:
        reason = "with num_levels=2, which branches no thought on its way: set num_levels=3 or more"
        refuse_idle(config, ("num_branches", "min_branch_length"), reason)
    before = (config.num_levels - 2) * config.min_branch_length  # tokens before the last level of thoughts, at least
    if config.num_levels > 2 and before >= config.max_thought_length:
        raise UserError(
            f"num_levels={config.num_levels} with min_branch_length={config.min_branch_length}: the last branches "
            f"would begin after {before} tokens or more, where max_thought_length={config.max_thought_length} cuts "
            "thoughts"
        )


def _check_reference(config: StepConfig) -> None:
    if not config.sync_ref_model:
        refuse_idle(config, ("ref_model_mixup_alpha", "ref_model_sync_steps"), "with sync_ref_model=false")
    if config.sync_ref_model and config.beta == 0:
        raise UserError("sync_ref_model=true with beta=0: without a KL penalty there is no reference: give beta")


def _check_diagnostics(config: StepConfig) -> None:
    if not all(isinstance(pattern, str) and pattern for pattern in config.layer_patterns):
        raise UserError(f"diagnostics_layers={config.diagnostics_layers}: must be names or patterns of weights")
    if config.layer_patterns and config.diagnostics_every == 0:
        raise UserError(
            f"diagnostics_layers={config.diagnostics_layers} with diagnostics_every=0 is never looked at: set "
            "diagnostics_every to the number of steps between looks"
        )
