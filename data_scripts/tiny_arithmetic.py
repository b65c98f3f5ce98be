"""Generated word problems in GSM8K's form, and a tiny untrained GPT-2 whose tokenizer knows their words.

    python -m data_scripts.tiny_arithmetic out=DIR

DIR/train.jsonl and test.jsonl hold {"id", "question", "answer"}: a story of one or two steps over small numbers, and a
worked solution with GSM8K's marks for a calculator, ending in "#### NUMBER". DIR/warm.jsonl, for a supervised warm
start, has the solutions of a hasty pupil, who leaves out the second step more often than not: what is left for a reward
to teach. The splits are drawn from different seeds, and no question of one stands in another. DIR/model is the GPT-2.
`train=N`, `test=N`, `warm=N` and `seed=N` change the sizes and the draw.
"""

import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_scripts.writing import SplitWriter, required, run_script, whole_number

SIZES = {"test": 256, "train": 2000, "warm": 4000}
OPTIONS = ("out", *SIZES, "seed")
HASTE = 0.8  # share of the two-step solutions of warm.jsonl that end after the first step
NAMES = ("Ann", "Ben", "Carla", "Dan", "Eve", "Finn", "Gina", "Hugo", "Iris", "Jan", "Kim", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "plums", "shells", "stamps")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# What the trainer adds to every question
INSTRUCTION = "First think inside <think> </think>, then give the answer inside <answer> </answer>."
# A word or a digit takes the space before it along; each digit is a token of its own
PIECES = rf"{'|'.join(TAGS)}| ?[A-Za-z]+| ?\d|.|\n"
UNKNOWN, END = "<|unknown|>", "<|endoftext|>"


def make_problem(rng: random.Random) -> dict[str, str]:
    """One problem as GSM8K writes it.

    >>> problem = make_problem(random.Random(6))
    >>> problem["question"]
    'Jan has 6 plums and gets 2 more. Then Jan gives away 2. How many plums does Jan have now?'
    >>> print(problem["answer"])
    Jan has 6 + 2 = <<6+2=8>>8 plums.
    Then Jan has 8 - 2 = <<8-2=6>>6 plums.
    #### 6
    """
    name, other = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    kind = rng.choice(("gain", "gain and loss", "two gains", "twice", "together"))
    end = f"How many {things} does {name} have now?"
    if kind == "gain":
        steps = [_step(f"{name} has", a, "+", b, things)]
        question = f"{name} has {a} {things} and gets {b} more. {end}"
    elif kind == "gain and loss":
        c = min(c, a + b)
        steps = [_step(f"{name} has", a, "+", b, things), _step(f"Then {name} has", a + b, "-", c, things)]
        question = f"{name} has {a} {things} and gets {b} more. Then {name} gives away {c}. {end}"
    elif kind == "two gains":
        steps = [_step(f"{name} has", a, "+", b, things), _step(f"Then {name} has", a + b, "+", c, things)]
        question = f"{name} has {a} {things} and gets {b} more. Then {name} finds {c}. {end}"
    elif kind == "twice":
        steps = [_step(f"{name} has", 2, "*", a, things)]
        question = f"{other} has {a} {things}. {name} has twice as many. How many {things} does {name} have?"
    else:
        steps = [_step(f"{name} has", a, "+", b, things), _step("Together they have", a, "+", a + b, things)]
        question = (
            f"{other} has {a} {things}. {name} has {b} more than {other}. How many {things} do they have together?"
        )
    solution = "\n".join(text for text, _ in steps)
    return {"question": question, "answer": f"{solution}\n#### {steps[-1][1]}"}


def _step(subject: str, left: int, sign: str, right: int, things: str) -> tuple[str, int]:
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return f"{subject} {left} {sign} {right} = <<{left}{sign}{right}={result}>>{result} {things}.", result


def hasty(problem: Mapping[str, str]) -> dict[str, str]:
    """The problem with a solution that ends after its first step.

    >>> print(hasty(make_problem(random.Random(6)))["answer"])
    Jan has 6 + 2 = <<6+2=8>>8 plums.
    #### 8
    """
    first, *_ = problem["answer"].splitlines()
    [result] = re.findall(r"=(\d+)>>", first)
    return {**problem, "answer": f"{first}\n#### {result}"}


def problems(split: str, count: int, seed: int, known: set[str]) -> Iterator[dict[str, str]]:
    """Problems whose questions are not `known` yet; they are added to it."""
    rng = random.Random(f"{split}-{seed}")
    made = 0
    while made < count:
        problem = make_problem(rng)
        if problem["question"] not in known:
            known.add(problem["question"])
            is_hasty = split == "warm" and rng.random() < HASTE
            yield {"id": f"{split}-{made}", **(hasty(problem) if is_hasty else problem)}
            made += 1


def words() -> list[str]:
    """Every piece of text that a problem, its solution or the trainer's own words can consist of."""
    rng = random.Random(0)
    texts = [INSTRUCTION, "\n".join(TAGS), " ".join("0123456789"), "0123456789"]
    texts += [f"{name}'s {name} {things}" for name in NAMES for things in THINGS]
    for _ in range(500):
        problem = make_problem(rng)
        texts += [problem["question"], re.sub(r"<<.*?>>", "", problem["answer"])]
    return [*TAGS, *sorted({piece for text in texts for piece in re.findall(PIECES, text)} - set(TAGS))]


def save_model(folder: Path, seed: int = 0) -> None:
    """A random GPT-2 of two layers with a word-level tokenizer, as plain transformers loads them."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate((UNKNOWN, END, *words()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    end = vocabulary[END]
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=256,
        n_embd=128,
        n_layer=2,
        n_head=4,
        initializer_range=0.05,
        bos_token_id=end,
        eos_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def convert(options: Mapping[str, str]) -> list[str]:
    """Writes as the options say; the lines to print."""
    [out] = required(options, "out")
    seed = whole_number(options, "seed", fewest=0) or 0
    known: set[str] = set()
    with SplitWriter(Path(out)) as writer:
        for split, size in SIZES.items():
            for problem in problems(split, whole_number(options, split) or size, seed, known):
                writer.take(split, problem["id"])
                writer.write(split, problem)
    save_model(Path(out) / "model", seed)
    return [f"{split}: {count:,} problems" for split, count in writer.counts.items()] + [
        f"model: {Path(out) / 'model'}"
    ]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, OPTIONS, convert, sys.argv[1:]))
