"""The loss of a minibatch as nested loops over its trees."""

import torch

from vlm_grpo.algorithm.advantage import Advantages


def slow_sequences(batch, config):
    """(advantage, [(tree, token of the tree), …], group of sequences) of every sequence that has a reward."""
    found = []
    for number, graded in enumerate(batch):
        a: Advantages = graded.advantages
        if config.dynamic_sampling == "drop" and not a.thoughts.any() and not a.answers.any():
            continue
        position = 0
        for i, thought in enumerate(graded.scored.tree.thoughts):
            own = [(number, position + t) for t in range(len(thought.ids))]
            position += len(own)
            if config.credit == "segment" and bool(a.valid_thoughts[i]):
                found.append((float(a.thoughts[i]), own, (number, "thought"), thought.closed))
            for j, answer in enumerate(thought.answers):
                rest = [(number, position + t) for t in range(len(answer.ids))]
                position += len(rest)
                if bool(a.valid_answers[i, j]):
                    whole = config.credit == "sequence"
                    closed = answer.closed and (thought.closed or not whole)
                    tokens = own + rest if whole else rest
                    found.append((float(a.answers[i, j]), tokens, (number, "answer"), closed))
    return found


def slow_loss(batch, new, old, entropies, config, factors=None):
    """The minibatch's loss from its sequences; per-token log-probabilities and entropies by tree."""
    factors = [torch.ones(len(values)) for values in new] if factors is None else factors
    sequences = slow_sequences(batch, config)
    groups: dict = {}
    for _, _, group, _ in sequences:
        groups[group] = groups.get(group, 0) + 1
    num_prompts = len({number for number, _ in groups})
    trained = [s for s in sequences if s[3] or not config.mask_truncated_completions]
    values = sorted({token: float(entropies[token[0]][token[1]].detach()) for s in trained for token in s[1]}.values())
    at = (len(values) - 1) * (1 - config.top_entropy_quantile)
    least = values[int(at)] + (at - int(at)) * (values[min(int(at) + 1, len(values) - 1)] - values[int(at)])
    total, bonus, active = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for advantage, tokens, group, _ in trained:
        level = group[1]
        log_ratios = [new[n][q] - old[n][q] for n, q in tokens]
        for (n, q), log_ratio in zip(tokens, log_ratios, strict=True):
            ratio = torch.exp(sum(log_ratios) / len(tokens) if config.loss_type == "gspo" else log_ratio)
            if config.loss_type == "cispo":
                loss = -min(float(ratio.detach()), 5.0) * advantage * new[n][q]
            elif config.loss_type == "gpg":
                loss = -advantage * new[n][q]
            elif config.loss_type == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                loss = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
            else:
                loss = -min(ratio * advantage, ratio.clamp(1 - config.epsilon, 1 + config.epsilon) * advantage)
            loss = loss * factors[n][q]
            if float(entropies[n][q].detach()) >= least:
                bonus, active = bonus + entropies[n][q], active + 1
            else:
                loss = 0.0 * loss
            if config.loss_type in ("dapo", "cispo", "gpg"):
                denominator = sum(len(s[1]) for s in trained if s[2][1] == level)
            elif config.loss_type == "dr_grpo":
                longest = {"thought": config.max_thought_length, "answer": config.max_answer_length}
                denominator = num_prompts * groups[group] * longest[level]
            else:
                denominator = num_prompts * groups[group] * len(tokens)
            weight = config.answer_weight if level == "answer" else 1.0
            total = total + weight * loss / denominator
    return total - config.entropy_coef * bonus / max(active, 1)
