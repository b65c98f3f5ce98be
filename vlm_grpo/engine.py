"""Rollouts on the tree: every prompt is read once, every token's keys and values exist once, branches copy nothing.

All live branches of the lanes' trees are one query block over one cache. What a branch sees is the tree rule of
`tree.py`,
applied to the segment and the path index that each slot of the cache remembers. Letters: B lanes (trees that grow at
the same time), L queries of the block per lane, S slots, K thoughts, M answers, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.branching import BLANK, END, BranchingConfig, FullTree, SentenceEnds, token_texts
from vlm_grpo.features import Features
from vlm_grpo.levels import Branches, QueryBlock, Span, StateCache
from vlm_grpo.rollout import Answer, Prompt, RolloutTree, Thought
from vlm_grpo.sampling import Sampler, SamplingConfig
from vlm_grpo.tags import ANSWER_CLOSE, THOUGHT_CLOSE, TagMatcher, bridge_ids
from vlm_grpo.tree import ancestors
from vlm_grpo.vlm import VLM


class TreeCache(StateCache):
    """Keys and values of B growing trees: per layer one buffer (B, H, S, D) in which every token has its own slot.

    `lanes` and `slots` say where the tokens of the next forward go; the model calls `update` once per layer.
    """

    def __init__(self, lanes: int, slots: int) -> None:
        super().__init__()
        self.shape = (lanes, slots)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._prefill: tuple[int, int] | None = None
        self._where: tuple[Tensor, Tensor] | None = None
        self._stop = 0

    def write_prompt(self, lane: int, length: int) -> None:
        """The next forward reads one prompt: its tokens take the lane's first slots and see nothing before them."""
        self._prefill = (lane, length)

    def write_block(self, slots: Int[Tensor, "n L"], stop: int, lanes: Int[Tensor, "n L"] | None = None) -> None:
        """The next forward reads a block: its tokens go to these slots (of these lanes; else each row to its own), and
        see the slots before `stop`.
        """
        self._prefill = None
        self._where = (torch.arange(len(slots), device=slots.device)[:, None] if lanes is None else lanes, slots)
        self._stop = stop

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, H, L, D); give those that the block may see."""
        if layer_idx not in self.keys:
            lanes, slots = self.shape
            heads = key_states.shape[1]
            # zeros: a slot that nobody sees must still not hold NaN
            self.keys[layer_idx] = key_states.new_zeros((lanes, heads, slots, key_states.shape[-1]))
            self.values[layer_idx] = value_states.new_zeros((lanes, heads, slots, value_states.shape[-1]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill is not None:
            lane, length = self._prefill
            keys[lane, :, :length] = key_states[0]
            values[lane, :, :length] = value_states[0]
            return key_states, value_states
        assert self._where is not None, "write_prompt or write_block comes before the forward"
        where = self._where
        keys.transpose(1, 2)[where] = key_states.transpose(1, 2)
        values.transpose(1, 2)[where] = value_states.transpose(1, 2)
        return keys[:, :, : self._stop], values[:, :, : self._stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use; positions and masks are always given, so no model builds its own from it."""
        return self._stop

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are part of the mask, never of the cache."""
        return [False] * max(1, len(self.keys))


@dataclass
class _Branch:
    """A thought, a piece of one or an answer while it grows, and what has begun at its end."""

    segment: int  # its number in the engine's full tree
    path: int  # tokens on its path so far, itself included
    limit: int
    matcher: TagMatcher
    state: int = 0  # of the matcher; it goes on from piece to piece
    ends: SentenceEnds | None = None  # given where it may be branched
    sentence: int = BLANK
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    bridge: tuple[int, ...] = ()
    pieces: "list[_Branch]" = field(default_factory=list)  # that a thought was branched into
    answers: "list[_Branch] | None" = field(default_factory=list)  # None: it is an answer itself

    def add(self, token: int, logprob: float, entropy: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.path += 1
        if not self.tag_found:  # with ignore_eos it goes on after its tag
            self.state = self.matcher.table[self.state][token]
        if self.ends is not None:
            self.sentence = self.ends.table[self.sentence][token]

    @property
    def tag_found(self) -> bool:
        return self.state == self.matcher.found


@dataclass
class _Feed:
    """Tokens that one branch puts into the next block, and the branches that the last one's logits start or
    continue.
    """

    segment: int
    path: int  # path index of the first token
    tokens: list[int]
    then: list[_Branch]


@dataclass
class _Lane:
    """One tree while it grows."""

    index: int  # of the prompt in the call
    prompt: Prompt
    used: int  # slots
    shift: int  # rotary position minus path index
    thoughts: list[_Branch]
    feeds: list[_Feed] = field(default_factory=list)

    def place(self, feed: _Feed, row: tuple[list[int], ...]) -> None:
        """Give the feed's tokens their slots, and add them to the block's row."""
        tokens, segments, paths, slots, positions = row
        count = len(feed.tokens)
        tokens.extend(feed.tokens)
        segments.extend([feed.segment] * count)
        paths.extend(range(feed.path, feed.path + count))
        slots.extend(range(self.used, self.used + count))
        positions.extend(range(feed.path + self.shift, feed.path + self.shift + count))
        self.used += count


class Engine:
    """Grows K thoughts × M answers from prompts that are each encoded and prefilled once."""

    def __init__(self, vlm: VLM, config: SamplingConfig, branching: BranchingConfig | None = None) -> None:
        """`branching`: how thoughts branch on their way; None: they do not."""
        self.vlm = vlm
        self.config = config
        self.branching = branching or BranchingConfig()
        pieces = [p or "" for p in vlm.tokenizer.convert_ids_to_tokens(range(len(vlm.tokenizer)))]
        width = vlm.base.get_output_embeddings().weight.shape[0]
        pieces += [""] * (width - len(pieces))
        self._thought_tag = TagMatcher(THOUGHT_CLOSE, pieces)
        self._answer_tag = TagMatcher(ANSWER_CLOSE, pieces)
        levels = self.branching.num_levels
        texts = token_texts(vlm.tokenizer) if levels > 2 else []
        self._ends = SentenceEnds(texts + [""] * (width - len(texts))) if levels > 2 else None
        self._bridge = bridge_ids(vlm.tokenizer, closed=True)
        self._bridge_unclosed = bridge_ids(vlm.tokenizer, closed=False)
        self._full = FullTree(config.num_thoughts, self.branching.num_branches, levels, config.num_answers)
        parents = self._full.parents
        self._nowhere = len(parents)  # segment of empty slots and of padding queries: sees nothing, is seen by nobody
        table = ancestors([*parents, -1])
        table[self._nowhere, self._nowhere] = False
        self._table = table.to(vlm.device)
        self.seconds: dict[str, float] = {}  # of the last rollout's phases

    def slots(self, prompt: Prompt) -> int:
        """Slots a tree can need, and never more: P + K·(T + bridge + M·A), where thoughts branch with every piece but
        the last of a path as short as it may be.
        """
        c, b = self.config, self.branching
        bridge = max(len(self._bridge), len(self._bridge_unclosed))
        count, total = c.num_thoughts, len(prompt.ids)
        for _ in range(b.num_levels - 2):
            total += count * b.min_branch_length
            count *= b.num_branches
        last = c.max_thought_length - (b.num_levels - 2) * b.min_branch_length
        return total + count * (last + bridge + c.num_answers * c.max_answer_length)

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
        trees: dict[int, RolloutTree] = {}
        size = min(len(prompts), self.config.rollout_lanes)
        waiting = iter(range(len(prompts)))
        grow = _Growth(self, size, max(self.slots(p) for p in prompts), draw)
        lanes: list[_Lane | None] = [None] * size
        self.seconds = dict.fromkeys(("prefill", "decode"), 0.0)
        while True:
            began = time.perf_counter()
            for position, lane in enumerate(lanes):
                index = next(waiting, None) if lane is None else None
                if index is not None:
                    lanes[position] = grow.start(position, index, prompts[index], features[index])
            if not any(lanes):
                return [trees[i] for i in range(len(prompts))]
            prefilled = time.perf_counter()
            grow.step(lanes)
            self.seconds["prefill"] += prefilled - began
            self.seconds["decode"] += time.perf_counter() - prefilled
            for position, lane in enumerate(lanes):
                if lane is not None and not lane.feeds:
                    trees[lane.index] = self._tree(lane)
                    lanes[position] = None

    def _tree(self, lane: _Lane) -> RolloutTree:
        thoughts: list[Thought] = []
        for branch in lane.thoughts:
            self._collect(branch, -1, [], thoughts)
        return RolloutTree(lane.prompt, tuple(thoughts))

    def _collect(self, branch: _Branch, parent: int, before: list[int], thoughts: list[Thought]) -> None:
        """Append the thought, and then all that goes on from it; `before` are the tokens of the pieces above it."""
        answers = tuple(
            Answer(
                *self._tensors(a),
                closed=a.tag_found or a.ids[-1] in self.vlm.eos_ids,
                text=self._text(a.ids, ANSWER_CLOSE),
            )
            for a in branch.answers or ()
        )
        bridge = torch.tensor(branch.bridge, dtype=torch.long)
        ids = before + branch.ids
        text = self._text(ids, THOUGHT_CLOSE)
        closed = branch.tag_found or bool(branch.pieces)
        thoughts.append(Thought(*self._tensors(branch), bridge, closed, text, answers, parent))
        place = len(thoughts) - 1
        for piece in branch.pieces:
            self._collect(piece, place, ids, thoughts)

    def _tensors(self, branch: _Branch) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(branch.ids), torch.tensor(branch.logprobs), torch.tensor(branch.entropies)

    def _text(self, ids: list[int], close: str) -> str:
        """Words before the closing tag. The tag may be a special token, which decoding skips, so it is looked for
        first.
        """
        raw = self.vlm.tokenizer.decode(ids, skip_special_tokens=False)
        if close in raw and close not in self.vlm.tokenizer.decode(ids, skip_special_tokens=True):
            return self.vlm.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return self.vlm.tokenizer.decode(ids, skip_special_tokens=True).partition(close)[0].strip()


class _Growth:
    """The cache, what its slots hold, and one decoding step of all lanes."""

    def __init__(self, engine: Engine, lanes: int, slots: int, draw: Sampler) -> None:
        self.engine, self.vlm, self.config, self.draw = engine, engine.vlm, engine.config, draw
        self.cache = TreeCache(lanes, slots + 1)  # the last slot takes the keys of padding queries
        self.trash = slots
        is_batch = self.vlm.attention == "levels"  # branches are rows of a batch, not columns of the block
        self.branches = Branches(self.vlm.logits, self.cache, engine._full.parents) if is_batch else None
        device = self.vlm.device
        # what a segment sees of its lane's slots, brought up to date by each write
        self.seen = torch.zeros((lanes, engine._nowhere + 1, slots + 1), dtype=torch.bool, device=device)
        self.path = torch.zeros((lanes, slots + 1), dtype=torch.long, device=device)
        self.lane_index = torch.arange(lanes, device=device)[:, None]

    def start(self, position: int, index: int, prompt: Prompt, features: Features | None) -> _Lane:
        """Prefill a prompt into a free lane and sample the first token of its K thoughts from the last logits."""
        length = len(prompt.ids)
        seen, distance = self.vlm.prompt_mask(prompt)
        self.cache.write_prompt(position, length)
        if self.branches is not None:
            self.branches.start(index)
        keep = torch.tensor([length - 1], device=self.vlm.device)
        ids, positions = prompt.ids.to(self.vlm.device)[None], prompt.position_ids.to(self.vlm.device)[:, None]
        logits = self.vlm.logits(ids, positions, seen[None], distance[None], self.cache, keep, features)
        self.seen[position] = False
        self.seen[position, : self.engine._nowhere, :length] = True
        self.path[position, :length] = torch.arange(length, device=self.vlm.device)
        thoughts = self._thoughts(0, length, self.config.max_thought_length, 0)
        lane = _Lane(index, prompt, length, prompt.next_position - length, thoughts)
        self._sample(logits[0], [(lane, thoughts)])
        return lane

    def _thoughts(self, above: int, path: int, limit: int, state: int) -> list[_Branch]:
        """Thoughts that begin where the segment `above` ends."""
        full, tag = self.engine._full, self.engine._thought_tag
        return [
            _Branch(segment, path, limit, tag, state, self.engine._ends if full.branches(segment) else None)
            for segment in full.branches(above)
        ]

    def step(self, lanes: Sequence[_Lane | None]) -> None:
        """Feed every live branch's last token (and the bridge of a thought that ended), then sample the next ones."""
        width = max(sum(len(f.tokens) for f in lane.feeds) for lane in lanes if lane is not None)
        rows: list[tuple[list[int], ...]] = []  # per lane: tokens, segments, path indices, slots, positions
        spans: list[Span] = []
        jobs: list[tuple[_Lane, list[_Branch]]] = []
        for number, lane in enumerate(lanes):
            row: tuple[list[int], ...] = ([], [], [], [], [])
            if lane is not None:
                for feed in lane.feeds:
                    spans.append(Span(lane.index, feed.segment, number, len(row[0]), len(feed.tokens)))
                    lane.place(feed, row)
                    jobs.append((lane, feed.then))
                lane.feeds = []
            padding = width - len(row[0])
            for column, fill in zip(row, (0, self.engine._nowhere, 0, self.trash, 0), strict=True):
                column.extend([fill] * padding)
            rows.append(row)
        block = torch.tensor(rows, device=self.vlm.device)  # (B, 5, L)
        tokens, segments, paths, slots, positions = block.unbind(1)
        stop = max(lane.used for lane in lanes if lane is not None)
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
        """Note that the block's tokens now lie in their slots; what each of them sees. `several`: of some branch more
        than one token comes.
        """
        lanes, table = self.lane_index, self.engine._table
        self.seen.transpose(1, 2)[lanes, slots] = table.T[segments]  # of a slot: its segment and what descends from it
        self.path[lanes, slots] = paths
        seen = self.seen[lanes, segments]  # (B, L, S)
        if several:  # a branch's later tokens lie in the cache already
            later = table[segments].gather(-1, segments[:, None].expand(-1, segments.shape[1], -1))
            later &= paths[:, :, None] < paths[:, None]
            at = slots[:, None].expand(later.shape)
            seen.scatter_(-1, at, seen.gather(-1, at) & ~later)
        return seen

    def _sample(self, logits: Float[Tensor, "n V"], jobs: Sequence[tuple[_Lane, list[_Branch]]]) -> None:
        """Draw the next token of each job's branches from the job's logits, and decide what each branch feeds next."""
        logprobs = self.vlm.policy_logits(logits).log_softmax(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        index = torch.tensor([i for i, (_, branches) in enumerate(jobs) for _ in branches], device=logits.device)
        drawn = self.draw(logprobs[index], [lane.index for lane, branches in jobs for _ in branches])
        picked = logprobs[index, drawn]
        tokens, values, entropies = drawn.tolist(), picked.tolist(), entropy[index].tolist()
        draws: Iterator[tuple[int, float, float]] = zip(tokens, values, entropies, strict=True)
        for lane, branches in jobs:
            for branch in branches:
                branch.add(*next(draws))
                self._next(lane, branch)

    def _next(self, lane: _Lane, branch: _Branch) -> None:
        c = self.config
        last = branch.ids[-1]
        says_end = not c.ignore_eos and (branch.tag_found or last in self.vlm.eos_ids)
        ended = says_end or len(branch.ids) >= branch.limit
        if not ended and branch.sentence == END and len(branch.ids) >= self.engine.branching.min_branch_length:
            branch.pieces = self._thoughts(branch.segment, branch.path, branch.limit - len(branch.ids), branch.state)
            lane.feeds.append(_Feed(branch.segment, branch.path - 1, [last], branch.pieces))
        elif not ended:
            lane.feeds.append(_Feed(branch.segment, branch.path - 1, [last], [branch]))
        elif branch.answers is not None:
            branch.bridge = self.engine._bridge if branch.tag_found else self.engine._bridge_unclosed
            path, tag = branch.path + len(branch.bridge), self.engine._answer_tag
            segments = self.engine._full.answers(branch.segment)
            branch.answers = [_Branch(s, path, c.max_answer_length, tag, answers=None) for s in segments]
            lane.feeds.append(_Feed(branch.segment, branch.path - 1, [last, *branch.bridge], branch.answers))
