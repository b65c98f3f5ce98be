"""Rollouts on the tree: every prompt is read once, and all live branches of all trees are one query block.

The engine speaks token ids: it feeds the model what `growth.py` says and draws from its logits. What a branch sees is
the tree rule of `tree.py`, applied to the segment and the path index that each slot of the cache remembers. Letters: B
lanes (trees that grow at the same time), L queries of the block per lane, S slots, K thoughts, M answers, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.model.features import Features
from vlm_grpo.model.vlm import VLM
from vlm_grpo.rollout.branches import Branches, QueryBlock, Span
from vlm_grpo.rollout.cache import TreeCache
from vlm_grpo.rollout.growth import Branch, GrowingTree, Growth, RolloutConfig, Row
from vlm_grpo.rollout.sampling import Sampler
from vlm_grpo.tree.branching import sentence_ends
from vlm_grpo.tree.pack import ancestors
from vlm_grpo.tree.tags import read_ids, tag_tables
from vlm_grpo.tree.types import Answer, Prompt, RolloutTree, Thought


class Engine:
    """Grows K thoughts × M answers from prompts that are each encoded and prefilled once."""

    def __init__(self, vlm: VLM, config: RolloutConfig) -> None:
        self.vlm, self.config = vlm, config
        width = vlm.base.get_output_embeddings().weight.shape[0]
        ends = sentence_ends(vlm.tokenizer, width) if config.num_levels > 2 else None
        self.growth = Growth(config, tag_tables(vlm.tokenizer, width), ends, vlm.eos_ids)
        self.seconds: dict[str, float] = {}  # of the last rollout's phases

    @torch.inference_mode()
    def rollout(
        self,
        prompts: Sequence[Prompt],
        features: Sequence[Features | None],
        draw: Sampler,
    ) -> list[RolloutTree]:
        """One tree per prompt. `features` are the prompts' images, encoded once by the caller; `draw` owns the
        randomness.
        """
        if not prompts:
            return []
        done: dict[int, RolloutTree] = {}
        size = min(len(prompts), self.config.rollout_lanes)
        waiting = iter(range(len(prompts)))
        decoder = _Decoder(self.vlm, self.growth, size, max(self.growth.slots(len(p.ids)) for p in prompts), draw)
        lanes: list[GrowingTree | None] = [None] * size
        self.seconds = dict.fromkeys(("prefill", "decode"), 0.0)
        while True:
            began = time.perf_counter()
            for lane, tree in enumerate(lanes):
                number = next(waiting, None) if tree is None else None
                if number is not None:
                    lanes[lane] = decoder.start(lane, number, prompts[number], features[number])
            if not any(lanes):
                return [done[i] for i in range(len(prompts))]
            prefilled = time.perf_counter()
            decoder.step(lanes)
            self.seconds["prefill"] += prefilled - began
            self.seconds["decode"] += time.perf_counter() - prefilled
            for lane, tree in enumerate(lanes):
                if tree is not None and not tree.feeds:
                    done[tree.number] = _finished(tree, self.growth, self.vlm.tokenizer)
                    lanes[lane] = None


class _Decoder:
    """The cache, what its slots hold, and one decoding step of all lanes."""

    def __init__(self, vlm: VLM, growth: Growth, lanes: int, slots: int, draw: Sampler) -> None:
        self.vlm, self.growth, self.draw = vlm, growth, draw
        self.cache = TreeCache(lanes, slots + 1)  # the last slot takes the keys of padding queries
        self.trash = slots
        parents, device = growth.full.parents, vlm.device
        is_batch = vlm.attention == "levels"  # branches are rows of a batch, not columns of the block
        self.branches = Branches(vlm.logits, self.cache, parents) if is_batch else None
        self.nowhere = len(parents)  # segment of empty slots and of padding queries: sees nothing, is seen by nobody
        table = ancestors([*parents, -1])
        table[self.nowhere, self.nowhere] = False
        self.table = table.to(device)
        # what a segment sees of its lane's slots, brought up to date by each write
        self.seen = torch.zeros((lanes, self.nowhere + 1, slots + 1), dtype=torch.bool, device=device)
        self.path = torch.zeros((lanes, slots + 1), dtype=torch.long, device=device)
        self.lane_index = torch.arange(lanes, device=device)[:, None]

    def start(self, lane: int, number: int, prompt: Prompt, features: Features | None) -> GrowingTree:
        """Prefill a prompt into a free lane and sample the first token of its K thoughts from the last logits."""
        length = len(prompt.ids)
        seen, distance = self.vlm.prompt_mask(prompt)
        self.cache.write_prompt(lane, length)
        if self.branches is not None:
            self.branches.start(number)
        keep = torch.tensor([length - 1], device=self.vlm.device)
        ids, positions = prompt.ids.to(self.vlm.device)[None], prompt.position_ids.to(self.vlm.device)[:, None]
        logits = self.vlm.logits(ids, positions, seen[None], distance[None], self.cache, keep, features)
        self.seen[lane] = False
        self.seen[lane, : self.nowhere, :length] = True
        self.path[lane, :length] = torch.arange(length, device=self.vlm.device)
        tree = self.growth.begin(number, prompt)
        self._sample(logits[0], [(tree, tree.thoughts)])
        return tree

    def step(self, lanes: Sequence[GrowingTree | None]) -> None:
        """Feed every live branch's last token (and the bridge of a thought that ended), then sample the next ones."""
        width = max(sum(len(f.tokens) for f in tree.feeds) for tree in lanes if tree is not None)
        rows: list[Row] = []
        spans: list[Span] = []
        jobs: list[tuple[GrowingTree, list[Branch]]] = []
        for lane, tree in enumerate(lanes):
            row: Row = ([], [], [], [], [])
            if tree is not None:
                for feed in tree.feeds:
                    spans.append(Span(tree.number, feed.segment, lane, len(row[0]), len(feed.tokens)))
                    tree.place(feed, row)
                    jobs.append((tree, feed.then))
                tree.feeds = []
            padding = width - len(row[0])
            for column, fill in zip(row, (0, self.nowhere, 0, self.trash, 0), strict=True):
                column.extend([fill] * padding)
            rows.append(row)
        block = torch.tensor(rows, device=self.vlm.device)  # (B, 5, L)
        tokens, segments, paths, slots, positions = block.unbind(1)
        stop = max(tree.used for tree in lanes if tree is not None)
        seen = self._see(segments, paths, slots, several=any(span.count > 1 for span in spans))[:, :, :stop]
        distance = None if self.vlm.window is None else paths[:, :, None] - self.path[:, None, :stop]
        positions = positions.expand(len(jobs[0][0].prompt.position_ids), -1, -1)
        if self.branches is not None:
            queries = QueryBlock(tokens, positions, slots, seen, distance)
            self._sample(self.branches.decode(queries, stop, spans), jobs)
            return
        self.cache.write_block(slots, stop)
        keep = torch.arange(width, device=self.vlm.device)
        logits = self.vlm.logits(tokens, positions, seen, distance, self.cache, keep).flatten(0, 1)
        wanted = torch.tensor([s.lane * width + s.first + s.count - 1 for s in spans], device=logits.device)
        self._sample(logits[wanted], jobs)

    def _see(
        self, segments: Int[Tensor, "B L"], paths: Int[Tensor, "B L"], slots: Int[Tensor, "B L"], several: bool
    ) -> Bool[Tensor, "B L S"]:
        """Note that the block's tokens now lie in their slots; what each of them sees. `several`: some branch brings
        more than one token.
        """
        lanes, table = self.lane_index, self.table
        self.seen.transpose(1, 2)[lanes, slots] = table.T[segments]  # of a slot: its segment and what descends from it
        self.path[lanes, slots] = paths
        seen = self.seen[lanes, segments]  # (B, L, S)
        if several:  # a branch's later tokens lie in the cache already
            later = table[segments].gather(-1, segments[:, None].expand(-1, segments.shape[1], -1))
            later &= paths[:, :, None] < paths[:, None]
            at = slots[:, None].expand(later.shape)
            seen.scatter_(-1, at, seen.gather(-1, at) & ~later)
        return seen

    def _sample(self, logits: Float[Tensor, "n V"], jobs: Sequence[tuple[GrowingTree, list[Branch]]]) -> None:
        """Draw the next token of each job's branches from the job's logits."""
        logprobs = self.vlm.policy_logits(logits).log_softmax(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        index = torch.tensor([i for i, (_, branches) in enumerate(jobs) for _ in branches], device=logits.device)
        drawn = self.draw(logprobs[index], [tree.number for tree, branches in jobs for _ in branches])
        picked = logprobs[index, drawn]
        tokens, values, entropies = drawn.tolist(), picked.tolist(), entropy[index].tolist()
        draws: Iterator[tuple[int, float, float]] = zip(tokens, values, entropies, strict=True)
        for tree, branches in jobs:
            for branch in branches:
                self.growth.add(tree, branch, *next(draws))


def _finished(tree: GrowingTree, growth: Growth, tokenizer: Any) -> RolloutTree:
    """The tree with its texts, its thoughts in depth-first order."""
    thoughts: list[Thought] = []

    def collect(branch: Branch, parent: int, before: list[int]) -> None:
        """Append the thought, and then all that goes on from it; `before` are the tokens of the pieces above it."""
        ids = before + branch.ids
        bridge = torch.tensor(branch.bridge, dtype=torch.long)
        answers = tuple(
            Answer(*_tensors(a), growth.is_closed(a), *read_ids(tokenizer, a.ids, a.matcher.tag))
            for a in branch.answers or ()
        )
        texts = read_ids(tokenizer, ids, branch.matcher.tag)
        number = len(thoughts)
        thoughts.append(Thought(*_tensors(branch), bridge, growth.is_closed(branch), *texts, answers, parent))
        for piece in branch.pieces:
            collect(piece, number, ids)

    for branch in tree.thoughts:
        collect(branch, -1, [])
    return RolloutTree(tree.prompt, tuple(thoughts))


def _tensors(branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(branch.ids), torch.tensor(branch.logprobs), torch.tensor(branch.entropies)
