"""Prints what one step makes of one question: the blocks of docs/architecture.md, from the shipped model.

python tests/support/one_tree.py

Letters: N packed positions, Q scored tokens.
"""

import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

from vlm_grpo.common.processes import Processes
from vlm_grpo.train import Run, TrainConfig


def one_step(folder: str) -> tuple[Any, Any, torch.Tensor, Any, Any]:
    """One step on one tree: its packed row, its images' features, its log-probabilities, the result, the tokenizer."""
    config = TrainConfig(
        task="refcoco",
        num_thoughts=2,
        num_answers=2,
        prompts_per_step=1,
        seed=1,
        max_samples=64,
        eval_samples=1,
        output_dir=folder,
    )
    scored = []
    with Run(config, Processes()) as run:
        logprobs = run.vlm.logprobs

        def watched(row, features):
            values = logprobs(row, features)
            scored.append((row, features, values.detach()))
            return values

        run.vlm.logprobs = watched
        result = run.step(1)
        row, features, values = scored[0]  # what comes after it looks at the negative of the image
        return row, features, values, result, run.vlm.tokenizer


def blocks() -> dict[str, str]:
    """The page's blocks by their names."""
    with tempfile.TemporaryDirectory() as folder:
        row, features, values, result, tokenizer = one_step(str(Path(folder) / "run"))
    words = [_word(tokenizer, token) for token in row.input_ids.tolist()]
    segment = row.segment.tolist()
    places = [[i for i, s in enumerate(segment) if s == number] for number in range(len(row.parents))]
    names = ["prompt", "thought 1", "answer 1.1", "answer 1.2", "thought 2", "answer 2.1", "answer 2.2"]
    ids = row.input_ids.tolist()
    made = {
        "prompt": _prompt(row, features, words, places[0]),
        "tree": "\n".join(
            f"{name:<11}{' '.join(f'{words[i]}:{ids[i]}' for i in places[n])}" for n, name in enumerate(names) if n
        ),
        "rewards": _rewards(result.rows),
        "row": _row(row, words, places, names),
        "mask": _mask(row, words, places),
        "scored": _scored(row, values, words, tokenizer, names),
        "loss": "\n".join(f"{name:<10} {result.metrics[name]:.3f}" for name in ("loss", "ratio", "grad_norm")),
    }
    return {name: text.replace("-0.000", " 0.000") for name, text in made.items()}


def _prompt(row: Any, features: Any, words: list[str], places: list[int]) -> str:
    [prompt] = row.prompts
    grid = prompt.pixels["image_grid_thw"][0].tolist()
    ids = row.input_ids.tolist()
    cut = [f"{words[i]}:{ids[i]}" for i in places]
    return "\n".join(
        [
            f"question   {prompt.sample.question}",
            f"box        {prompt.sample.target.box_xyxy} in an image of {prompt.original_sizes[0]}",
            f"resized    {prompt.resized_sizes[0]}: a grid of {grid} patches, {int((prompt.image_block == 0).sum())} "
            f"image tokens, features {tuple(features.tensors[0].shape)}",
            *textwrap.wrap(
                f"ids        … {' '.join(cut[11:30])} … {' '.join(cut[-4:])}   ({len(places)} tokens)",
                width=110,
                subsequent_indent=" " * 11,
                break_long_words=False,
                break_on_hyphens=False,
            ),
        ]
    )


def _rewards(rows: list[Any]) -> str:
    lines = ["thought                  answer (original pixels)         reward  A(thought)  A(answer)"]
    lines += [
        f"{r.thought:<24} {r.answer:<31} {r.reward:7.3f} {r.thought_advantage:11.3f} {r.answer_advantage:10.3f}"
        for r in rows
    ]
    return "\n".join(lines)


def _word(tokenizer: Any, token: int) -> str:
    """The text of a token, its spaces as dots."""
    return repr(tokenizer.decode([token]))[1:-1].replace(" ", "·")


def _shown(places: list[int]) -> list[int]:
    return places if len(places) <= 3 else [*places[:2], places[-1]]


def _row(row: Any, words: list[str], places: list[list[int]], names: list[str]) -> str:
    lines = ["place     id  token          segment      path  rotary position"]
    for number, name in enumerate(names):
        chosen = _shown(places[number]) if number else [0, 15, 16, places[0][-1]]
        for before, i in zip([None, *chosen], chosen, strict=False):
            if before is not None and i - before > 1:
                lines.append("    …")
            axes = row.position_ids[:, i].tolist()
            at = axes[0] if len(set(axes)) == 1 else tuple(axes)
            lines.append(f"{i:>5} {row.input_ids[i]:>6}  {words[i]:<14} {name:<12} {row.path[i]:>4}  {at}")
    return "\n".join(lines)


def _mask(row: Any, words: list[str], places: list[list[int]]) -> str:
    chosen = [i for number, of in enumerate(places) for i in (_shown(of) if number else of[-2:])]
    seen = row.mask[chosen][:, chosen].tolist()
    head = "place  token      " + " ".join(f"{i:>3}" for i in chosen)
    lines = [
        f"{i:>5}  {words[i]:<10} " + " ".join("  x" if see else "  ." for see in line)
        for i, line in zip(chosen, seen, strict=True)
    ]
    return "\n".join([head, *lines])


def _scored(row: Any, values: torch.Tensor, words: list[str], tokenizer: Any, names: list[str]) -> str:
    lines = ["predictor  target                   of          log π_old   log π       A    weight"]
    owner = row.owner.tolist()
    for number, name in enumerate(names):
        of = [q for q, segment in enumerate(owner) if segment == number]
        least = min(of, key=values.tolist().__getitem__, default=0)  # the token that was least sure
        chosen = sorted({of[0], least, of[-1]}) if of else []
        for before, q in zip([None, *chosen], chosen, strict=False):
            if before is not None and q - before > 1:
                lines.append("        …")
            place, target = int(row.predictor[q]), int(row.targets[q])
            word = _word(tokenizer, target)
            lines.append(
                f"{place:>5} {words[place]:<10} → {word:<9} {target:>4}  {name:<12} {row.old_logprobs[q]:7.3f} "
                f"{values[q]:9.3f} {row.advantages[q]:8.3f}  {row.weights[q]:.4f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    for title, text in blocks().items():
        sys.stdout.write(f"== {title}\n{text}\n\n")
