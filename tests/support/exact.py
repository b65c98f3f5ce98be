"""Trees of random tokens and the unpacked model, the oracle of the packed pass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from support import families
from vlm_grpo.model.vlm import VLM
from vlm_grpo.task import Sample
from vlm_grpo.tree.pack import Segment
from vlm_grpo.tree.types import Prompt

FAMILIES = (*families.IMAGE_FAMILIES, *families.TEXT_FAMILIES)
LENGTHS = ((5, (3, 1)), (2, (4, 2)), (7, (1, 6)))  # per thought: its tokens (one of them forced), its answers' tokens


def make_vlm(name: str, dtype: torch.dtype = torch.float64, **options) -> VLM:
    return VLM(families.load_model(name, dtype), families.load_processor(name), **options)


def make_prompt(vlm: VLM, images: int, seed: int = 0, question: str = "Where is the red box?") -> Prompt:
    return vlm.prompts.build(Sample(f"s{seed}", families.noise_images(images, seed), question, None))


def allowed_ids(vlm: VLM) -> Tensor:
    allowed = torch.ones(len(vlm.tokenizer), dtype=torch.bool)
    allowed[vlm.forbidden[vlm.forbidden < len(allowed)]] = False
    return allowed.nonzero()[:, 0]


def random_tree(vlm: VLM, prompt: Prompt, seed: int) -> list[Segment]:
    """Three thoughts with two answers each, all of different lengths; the thought's last token is forced."""
    generator = torch.Generator().manual_seed(seed)
    ids = allowed_ids(vlm)

    def segment(count: int, parent: int, scored: int) -> Segment:
        chosen = ids[torch.randint(len(ids), (count,), generator=generator)]
        weight = float(torch.rand(1, generator=generator))
        return Segment(chosen, parent, scored, advantage=1.0, weight=weight)

    tree = [Segment(prompt.ids, -1, prompt=prompt)]
    for thought, answers in LENGTHS:
        tree.append(segment(thought, 0, thought - 1))
        parent = len(tree) - 1
        tree.extend(segment(answer, parent, answer) for answer in answers)
    return tree


def inputs_of(vlm: VLM, prompt: Prompt) -> dict[str, Tensor]:
    """What the plain model takes for a prompt alone."""
    inputs = {"input_ids": prompt.ids[None], **prompt.pixels, "attention_mask": torch.ones_like(prompt.ids[None])}
    names = vlm.processor.model_input_names if vlm.family.is_vision else ()
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in names]
    return inputs | {name: (prompt.image_block >= 0).int()[None] for name in kinds}


def unpacked(plain: nn.Module, vlm: VLM, trees: Sequence[list[Segment]]) -> Tensor:
    """Scored log-probabilities in packed order, each branch from its root on by an ordinary forward of its own."""
    scores = []
    for tree in trees:
        inputs = inputs_of(vlm, tree[0].prompt)
        for segment in tree[1:]:
            above, parent = [], segment.parent
            while parent > 0:
                above.insert(0, tree[parent].ids)
                parent = tree[parent].parent
            response = torch.cat([*above, segment.ids])
            logprobs = families.unpacked_logprobs(plain, inputs, response, vlm.temperature, vlm.forbidden.tolist())
            first = len(response) - len(segment.ids)
            scores.append(logprobs[first : first + segment.num_scored])
    return torch.cat(scores)


def gradients(model) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    zero = torch.zeros(())
    difference = sum(float((ours.get(n, zero) - theirs.get(n, zero)).square().sum()) for n in {*ours, *theirs})
    return (difference / sum(float(g.square().sum()) for g in theirs.values())) ** 0.5
