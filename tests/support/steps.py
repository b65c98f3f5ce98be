"""Whole steps: a trainer on small models, and the nested loops that it must equal."""

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from support import families
from support.exact import inputs_of
from vlm_grpo.algorithm import trainer as trainer_module
from vlm_grpo.algorithm.trainer import StepConfig, Trainer
from vlm_grpo.common.processes import Processes
from vlm_grpo.data.reader import DataConfig, PromptReader
from vlm_grpo.model.vlm import VLM
from vlm_grpo.task import Reward, Sample, TaskAdapter
from vlm_grpo.tree.pack import TreePack
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought

QUESTIONS = ("Where is the red box?", "the box", "Where is the red box in the image? the answer")
# A norm that is never reached leaves the gradient as it is; weights move by 0, so that every pass sees the same ones
CONFIG = StepConfig(
    num_thoughts=3,
    num_answers=2,
    max_thought_length=5,
    max_answer_length=4,
    temperature=0.8,
    max_grad_norm=math.inf,
    learning_rate=0.0,
)


RewardRule = Callable[[Sample, str], float | None]


class Rule(TaskAdapter):
    """A task without data of its own: the reward is what `rule` says."""

    def __init__(self, rule: RewardRule) -> None:
        self.rule = rule

    def samples(self, split: str) -> Sequence[Sample]:
        raise NotImplementedError

    def reward(self, sample: Sample, answer: str) -> Reward | None:
        value = self.rule(sample, answer)
        return None if value is None else Reward(value, {"half": value / 2})

    def reference_answer(self, sample: Sample) -> str:
        raise NotImplementedError


def by_hash(sample: Sample, answer: str) -> float | None:
    """Six different rewards, as good as random, and none for one answer in seven."""
    grade = zlib.crc32(answer.encode("utf-8", "surrogatepass")) % 7
    return None if grade == 6 else grade / 5


def make_samples(images: Sequence[int]) -> list[Sample]:
    return [Sample(f"s{i}", families.noise_images(count, i), QUESTIONS[i % 3], None) for i, count in enumerate(images)]


def make_trainer(vlm: VLM, config: StepConfig, rule: RewardRule = by_hash) -> Trainer:
    task = Rule(rule)
    return Trainer(vlm, task, PromptReader(vlm.prompts, task, DataConfig(), 10_000), config, Processes())


def make_vlm(name: str, dtype: torch.dtype = torch.float64, **options) -> VLM:
    return VLM(families.load_model(name, dtype), families.load_processor(name), CONFIG.temperature, **options)


@torch.no_grad()
def perturb(model: torch.nn.Module, size: float) -> None:
    """Move every trainable weight by normal noise of this size."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.requires_grad:
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


class Watch:
    """What a trainer grew, scored and gave to its optimiser, seen through its own methods."""

    def __init__(self, trainer: Trainer, change: Callable[[RolloutTree], RolloutTree] = lambda tree: tree) -> None:
        self.trees: list[RolloutTree] = []
        self.gradients: list[dict[str, Tensor]] = []  # per optimiser step
        self.rates: list[float] = []
        self.packs: list[trainer_module.Any] = []  # rows that were scored, in order
        rollout, logprobs = trainer.engine.rollout, trainer.vlm.logprobs
        named = trainer.optimizer.named

        def watched_rollout(*args):
            self.trees = [change(tree) for tree in rollout(*args)]
            return self.trees

        def watched_logprobs(pack, features):
            values = logprobs(pack, features)
            if values.requires_grad:
                self.packs.append((pack, values.detach()))
            return values

        def watched_step(*_):
            self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
            self.rates.append(trainer.optimizer.adamw.param_groups[0]["lr"])

        trainer.engine.rollout, trainer.vlm.logprobs = watched_rollout, watched_logprobs
        trainer.optimizer.adamw.register_step_pre_hook(watched_step)


def off_policy(tree: RolloutTree) -> RolloutTree:
    """The tree as if an older policy had sampled it: log-probabilities lower or higher by up to 0.5."""
    generator = torch.Generator().manual_seed(len(tree.prompt.ids))

    def moved(logprobs: Tensor) -> Tensor:
        return logprobs + torch.rand(logprobs.shape, generator=generator) - 0.5

    thoughts = [
        replace(
            thought,
            logprobs=moved(thought.logprobs),
            answers=tuple(replace(a, logprobs=moved(a.logprobs)) for a in thought.answers),
        )
        for thought in tree.thoughts
    ]
    return RolloutTree(tree.prompt, tuple(thoughts))


def standardised(values: Sequence[float]) -> list[float]:
    """(x - mean) / (std + 1e-4) with the sample standard deviation; zeros where all are equal."""
    mean = sum(values) / len(values)
    if max(values) - min(values) < 1e-6:
        return [0.0] * len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + 1e-4) for v in values]


def branch_arguments(vlm: VLM, prompt: Prompt, ids: Tensor):
    """What `families.unpacked_logprobs` takes after the model; cloned, for ids that grew in inference mode have no
    place in a graph.
    """
    return inputs_of(vlm, prompt), ids.clone(), vlm.temperature, vlm.forbidden.tolist()


@dataclass
class Oracle:
    """The objective by nested loops over unpacked forwards, one ordinary pass per branch."""

    plain: torch.nn.Module
    reference: torch.nn.Module
    vlm: VLM  # for its table of forbidden ids and its prompts only
    rule: RewardRule
    config: StepConfig

    def loss(self, trees: Sequence[RolloutTree]) -> Tensor:
        rewards = [
            [[self.rule(tree.prompt.sample, a.text) for a in t.answers] for t in tree.thoughts] for tree in trees
        ]
        total = torch.zeros((), dtype=torch.float64)
        counted = sum(any(r is not None for row in of_tree for r in row) for of_tree in rewards)
        for tree, of_tree in zip(trees, rewards, strict=True):
            total = total + self._tree(tree, of_tree) / counted
        return total

    def _tree(self, tree: RolloutTree, rewards: list[list[float | None]]) -> Tensor:
        values = {}  # of the valid thoughts
        for i, row in enumerate(rewards):
            earned = [r for r in row if r is not None]
            if earned:
                values[i] = sum(earned) / len(earned)
        of_thought = dict(zip(values, standardised(list(values.values())), strict=True)) if values else {}
        graded = {(i, j): r for i, row in enumerate(rewards) for j, r in enumerate(row) if r is not None}
        of_answer = dict(zip(graded, standardised(list(graded.values())), strict=True)) if graded else {}
        total = torch.zeros((), dtype=torch.float64)
        for i, advantage in of_thought.items():
            thought = tree.thoughts[i]
            branch = self._branch(tree.prompt, thought.ids, len(thought.ids), thought.logprobs, advantage)
            total = total + branch / len(of_thought)
        for (i, j), advantage in of_answer.items():
            thought, answer = tree.thoughts[i], tree.thoughts[i].answers[j]
            ids = torch.cat([thought.ids, thought.bridge_ids, answer.ids])
            branch = self._branch(tree.prompt, ids, len(answer.ids), answer.logprobs, advantage)
            total = total + self.config.answer_weight * branch / len(of_answer)
        return total

    def _branch(self, prompt: Prompt, ids: Tensor, scored: int, old: Tensor, advantage: float) -> Tensor:
        """Mean loss of the last `scored` tokens."""
        args = branch_arguments(self.vlm, prompt, ids)
        logprobs = families.unpacked_logprobs(self.plain, *args)[-scored:]
        with torch.no_grad():
            reference = families.unpacked_logprobs(self.reference, *args)[-scored:]
        low, high = 1 - self.config.epsilon, 1 + (self.config.epsilon_high or self.config.epsilon)
        total = torch.zeros((), dtype=torch.float64)
        for new, before, ref in zip(logprobs, old.tolist(), reference, strict=True):
            ratio = (new - before).exp()
            clipped = ratio.clamp(low, high)
            objective = ratio * advantage if ratio * advantage <= clipped * advantage else clipped * advantage
            k3 = (ref - new).exp() - (ref - new) - 1
            total = total - objective + self.config.beta * k3
        return total / scored


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) >= {n for n, g in theirs.items() if g.abs().max() > 0}
    difference = sum(float((ours[n] - theirs[n]).square().sum()) for n in theirs)
    return math.sqrt(difference / sum(float(g.square().sum()) for g in theirs.values()))


def of_answers(row: TreePack) -> Tensor:
    """Of each scored token, whether it is an answer's: one of a leaf."""
    return torch.tensor([segment not in row.parents for segment in range(len(row.parents))])[row.owner]


def with_adapter(name: str) -> VLM:
    vlm = make_vlm(name)
    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks for a name that transformers has deprecated
    targets = [n for n, m in vlm.model.named_modules() if n.endswith(("q_proj", "v_proj", "gate_proj"))]
    model = get_peft_model(vlm.model, LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    return VLM(model.double(), vlm.processor, CONFIG.temperature)


def hand_made_tree(lengths: Sequence[tuple[int, Sequence[int]]], open_ends: set[tuple[int, ...]]) -> RolloutTree:
    """Thoughts and answers of these lengths; `open_ends` are the indices of those cut by their length."""
    ids = torch.tensor([1, 2])
    prompt = Prompt(Sample("s", [], "q", None), "q", ids, torch.arange(2)[None], torch.tensor([-1, -1]), {})

    def fields(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ones(count, dtype=torch.long), torch.zeros(count), torch.full((count,), 0.25)

    thoughts = []
    for i, (length, answers) in enumerate(lengths):
        grown = tuple(Answer(*fields(n), (i, j) not in open_ends, "", "") for j, n in enumerate(answers))
        thoughts.append(Thought(*fields(length), ids[:0], (i,) not in open_ends, "", "", grown))
    return RolloutTree(prompt, tuple(thoughts))
