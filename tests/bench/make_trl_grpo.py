"""Write tests/cases/trl_grpo.json: what TRL 1.16.0's GRPOTrainer computes for given rewards and log-probabilities.

Run in an environment that has trl==1.16.0: `python tests/bench/make_trl_grpo.py`. A real trainer takes one step on a
random text model of a few thousand weights. Its reward function returns the table below, so the advantages are the
trainer's own; then its `_compute_loss` is called, under the options of each case, on random log-probabilities and
entropies (float64) in place of the model's.
"""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

CASES = Path(__file__).parents[1] / "cases"
GENERATIONS, LENGTH = 6, 9
REWARDS = [[0.0, 1.0, 1.0, 0.25, None, 0.5], [0.3, 0.3, 0.3, 0.3, 0.3, 0.3], [0.9, 0.1, 0.2, 0.7, 0.4, 0.4]]
LENGTHS = [9, 7, 9, 9, 6, 9]  # of the third group's completions
TRUNCATED = 4  # the completion that is masked where truncated ones are
EVERYTHING = {
    **{"beta": 0.04, "use_bias_correction_kl": True, "mask_truncated_completions": True},
    **{"top_entropy_quantile": 0.4, "entropy_coef": 0.01, "importance_sampling_cap": 1.2},
}
# By names of GRPOConfig, but gspo, which there is loss_type=grpo with importance_sampling_level=sequence, and
# importance_sampling_cap, there vllm_importance_sampling_clip_max
LOSSES = {
    "grpo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "bnpo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {"epsilon": 0.005, "epsilon_high": 0.006},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
}
OPTIONS = [
    {"loss_type": name, **options, **more}
    for name, options in LOSSES.items()
    for more in ({}, {"beta": 0.04}, {"delta": 1.5 if name != "gspo" else 1.05}, EVERYTHING)
    if "delta" not in more or name not in ("cispo", "sapo")
]


class Recorder(GRPOTrainer):
    """A trainer that notes what it computes in its first step."""

    record: dict | None = None

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.record is None:
            groups = batch["advantages"].view(len(REWARDS), GENERATIONS)
            self.record = {"rewards": REWARDS, "advantages": groups.tolist(), "losses": self._losses(groups[2])}
        return batch

    def _losses(self, advantages):
        generator = torch.Generator().manual_seed(0)

        def random(scale, make=torch.randn):
            return scale * make((GENERATIONS, LENGTH), generator=generator, dtype=torch.float64)

        logprobs = random(-3, torch.rand)
        old, ref = logprobs + random(0.4), logprobs + random(0.8)
        sampling, entropies = old + random(0.3), random(2, torch.rand)
        mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
        tensors = {"logprobs": logprobs, "old_logprobs": old, "ref_logprobs": ref, "sampling_logprobs": sampling}
        tensors |= {"entropies": entropies}
        cases = [self._case(options, advantages, mask, tensors) for options in OPTIONS]
        rounded = {name: shortened(value) for name, value in tensors.items()}
        return rounded | {"lengths": LENGTHS, "truncated": TRUNCATED, "cases": cases}

    def _case(self, options, advantages, mask, tensors):
        """What `_compute_loss` gives under these options; the trainer's own settings are restored."""
        own = dict(vars(self))
        own_args = dict(vars(self.args))
        own_metrics, self._metrics = self._metrics, {"train": defaultdict(list)}
        loss_type = options["loss_type"]
        self.loss_type = "grpo" if loss_type == "gspo" else loss_type
        self.importance_sampling_level = "sequence" if loss_type == "gspo" else "token"
        self.epsilon_low, self.epsilon_high = options.get("epsilon", 0.2), options.get("epsilon_high", 0.2)
        self.beta = options.get("beta", 0.0)
        self.args.delta = options.get("delta")
        self.args.use_bias_correction_kl = options.get("use_bias_correction_kl", False)
        self.top_entropy_quantile = options.get("top_entropy_quantile", 1.0)
        self.entropy_coef = options.get("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef > 0
        self.current_gradient_accumulation_steps = 1
        leaf, entropies = (tensors[name].clone().requires_grad_() for name in ("logprobs", "entropies"))
        self._get_per_token_logps_and_entropies = lambda *a, **k: (leaf, entropies, None)
        if options.get("mask_truncated_completions"):
            mask = mask * (torch.arange(GENERATIONS) != TRUNCATED)[:, None]
        ids = torch.ones_like(mask)
        inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": advantages, "num_items_in_batch": mask.sum()}
        inputs |= {"old_per_token_logps": tensors["old_logprobs"], "ref_per_token_logps": tensors["ref_logprobs"]}
        if cap := options.get("importance_sampling_cap"):
            self.use_vllm = self.vllm_importance_sampling_correction = True
            ratio = torch.exp((tensors["old_logprobs"] - tensors["sampling_logprobs"]) * mask)
            inputs["importance_sampling_ratio"] = ratio.clamp(max=cap)  # as its token_truncate mode does
        loss = GRPOTrainer._compute_loss(self, self.model, inputs)
        loss.backward()
        logged = {name: values[0] for name, values in self._metrics["train"].items()}
        wanted = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio")
        result = {"loss": loss.item(), "metrics": {name: logged[name] for name in wanted if name in logged}}
        result["gradient"] = shortened(leaf.grad)
        if self.entropy_coef:
            result["entropy_gradient"] = shortened(entropies.grad)
        vars(self).clear()
        vars(self).update(own)
        vars(self.args).update(own_args)
        self._metrics = own_metrics
        return {"options": options, **result}


def shortened(values):
    """As lists, with enough digits for 1e-9."""
    return [[float(f"{value:.10g}") for value in row] for row in values.tolist()]


def main() -> None:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    rows = [{"prompt": "a b c"[: 2 * i + 1], "group": i} for i in range(len(REWARDS))]

    def reward(prompts, completions, group, **_):
        seen = dict.fromkeys(group, 0)
        values = []
        for i in group:
            values.append(REWARDS[i][seen[i]])
            seen[i] += 1
        return values

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GENERATIONS * len(REWARDS),
            num_generations=GENERATIONS,
            max_completion_length=LENGTH,
            max_steps=1,
            loss_type="grpo",
            shuffle_dataset=False,
            use_cpu=True,
            report_to=[],
            bf16=False,
            save_strategy="no",
        )
        trainer = Recorder(model, reward, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        trainer.train()
    record = {"made_by": "tests/bench/make_trl_grpo.py with trl 1.16.0"}
    record |= trainer.record
    CASES.joinpath("trl_grpo.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
