"""Write tests/cases/trl_grpo.json: what TRL 1.16.0's GRPOTrainer computes for given rewards and log-probabilities.

Run in an environment that has trl==1.16.0: `python tests/bench/make_trl_grpo.py`. A real trainer takes one step on a
random text model of a few thousand weights. Its reward function returns the table below, so the advantages are the
trainer's own; then its `_compute_loss` is called on random log-probabilities in place of the model's.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

CASES = Path(__file__).parents[1] / "cases"
GENERATIONS, LENGTH = 6, 9
REWARDS = [[0.0, 1.0, 1.0, 0.25, None, 0.5], [0.3, 0.3, 0.3, 0.3, 0.3, 0.3], [0.9, 0.1, 0.2, 0.7, 0.4, 0.4]]
# Segments of one completion: as GRPO's one sequence, and as a thought and an answer of their own
SEGMENTS = {"completion": (0, 9), "thought": (0, 5), "answer": (5, 9)}
EPSILON, EPSILON_HIGH = 0.2, 0.28


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
        shape = (GENERATIONS, LENGTH)
        logprobs = -3 * torch.rand(shape, generator=generator)
        old = logprobs + 0.4 * torch.randn(shape, generator=generator)
        ref = logprobs + 0.8 * torch.randn(shape, generator=generator)
        ids, mask = torch.ones(shape, dtype=torch.long), torch.ones(shape, dtype=torch.long)
        mask[1, 7:] = 0  # completions of unequal lengths
        mask[4, 6:] = 0
        cases = []
        for beta in (0.0, 0.04):
            for name, (start, stop) in SEGMENTS.items():
                segment = torch.zeros(shape, dtype=torch.long)
                segment[:, start:stop] = 1
                leaf = logprobs.clone().requires_grad_()
                inputs = {
                    "prompt_ids": ids,
                    "prompt_mask": ids,
                    "completion_ids": ids,
                    "completion_mask": mask * segment,
                }
                inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
                # the step's own settings, restored below
                own_function, own_beta = self._get_per_token_logps_and_entropies, self.beta
                own_steps, self.current_gradient_accumulation_steps = self.current_gradient_accumulation_steps, 1
                self._get_per_token_logps_and_entropies = lambda *a, leaf=leaf, **k: (leaf, torch.zeros(shape), None)
                self.beta = beta
                loss = GRPOTrainer._compute_loss(self, self.model, inputs)
                self._get_per_token_logps_and_entropies, self.beta = own_function, own_beta
                self.current_gradient_accumulation_steps = own_steps
                loss.backward()
                cases.append({"segment": name, "beta": beta, "loss": loss.item(), "gradient": leaf.grad.tolist()})
        tensors = {
            "logprobs": logprobs,
            "old_logprobs": old,
            "ref_logprobs": ref,
            "mask": mask,
            "advantages": advantages,
        }
        return {key: value.tolist() for key, value in tensors.items()} | {"segments": SEGMENTS, "cases": cases}


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
            use_bias_correction_kl=False,  # its default multiplies k3 by the ratio; the paper does not
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH,
            shuffle_dataset=False,
            use_cpu=True,
            report_to=[],
            bf16=False,
            save_strategy="no",
        )
        trainer = Recorder(model, reward, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        trainer.train()
    record = {
        "made_by": "tests/bench/make_trl_grpo.py with trl 1.16.0",
        "epsilon": EPSILON,
        "epsilon_high": EPSILON_HIGH,
    }
    record |= trainer.record
    CASES.joinpath("trl_grpo.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
