"""How trees grow: which branch feeds which tokens to the model, where it ends, and what begins at its end.

Bookkeeping over token ids alone: neither the model, which gives the tokens, nor their text is known here.
"""

from dataclasses import dataclass, field, fields

from vlm_grpo.rollout.sampling import SamplingConfig
from vlm_grpo.tree.branching import BLANK, END, BranchingConfig, FullTree, SentenceEnds
from vlm_grpo.tree.tags import TagMatcher, TagTables
from vlm_grpo.tree.types import Prompt

# A lane's part of the next block, by columns: tokens, segments, path indices, cache slots, rotary positions
Row = tuple[list[int], list[int], list[int], list[int], list[int]]


@dataclass
class RolloutConfig(BranchingConfig, SamplingConfig):
    """How trees grow."""


def unbranched(config: SamplingConfig) -> RolloutConfig:
    """The same sampling, of thoughts that do not branch on their way, whatever else `config` says."""
    return RolloutConfig(**{option.name: getattr(config, option.name) for option in fields(SamplingConfig)})


@dataclass
class Branch:
    """A thought, a piece of one or an answer while it grows, and what has begun at its end."""

    segment: int  # its number in the full tree
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
    pieces: "list[Branch]" = field(default_factory=list)  # that a thought was branched into
    answers: "list[Branch] | None" = field(default_factory=list)  # None: it is an answer itself

    def add(self, token: int, logprob: float, entropy: float) -> None:
        """Append a token that was drawn for this branch."""
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
        """Its closing tag has been written."""
        return self.state == self.matcher.found


@dataclass
class Feed:
    """Tokens that one branch puts into the next block. The logits of the last one start or continue branches."""

    segment: int
    path: int  # path index of the first token
    tokens: list[int]
    then: list[Branch]


@dataclass
class GrowingTree:
    """One tree while it grows; it has ended when it feeds nothing."""

    number: int  # of the prompt in the call
    prompt: Prompt
    thoughts: list[Branch]
    used: int  # slots of the cache, the prompt's first
    feeds: list[Feed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shift = self.prompt.next_position - len(self.prompt.ids)  # rotary position minus path index

    def place(self, feed: Feed, row: Row) -> None:
        """Give the feed's tokens their slots, and add them to the block's row."""
        tokens, segments, paths, slots, positions = row
        count = len(feed.tokens)
        tokens.extend(feed.tokens)
        segments.extend([feed.segment] * count)
        paths.extend(range(feed.path, feed.path + count))
        slots.extend(range(self.used, self.used + count))
        positions.extend(range(feed.path + self.shift, feed.path + self.shift + count))
        self.used += count


class Growth:
    """The rules by which all trees of an engine grow."""

    def __init__(
        self, config: RolloutConfig, tags: TagTables, ends: SentenceEnds | None, eos_ids: frozenset[int]
    ) -> None:
        """`ends`: where thoughts may branch; needed if they do."""
        self.config, self.tags, self.ends, self.eos_ids = config, tags, ends, eos_ids
        self.full = FullTree(config.num_thoughts, config.num_branches, config.num_levels, config.num_answers)

    def slots(self, prompt_length: int) -> int:
        """Slots that a tree can need, and never more: P + K·(T + bridge + M·A), where thoughts branch with every piece
        but the last of a path as short as it may be.
        """
        c = self.config
        bridge = max(len(self.tags.bridge), len(self.tags.bridge_unclosed))
        count, total = c.num_thoughts, prompt_length
        for _ in range(c.num_levels - 2):
            total += count * c.min_branch_length
            count *= c.num_branches
        last = c.max_thought_length - (c.num_levels - 2) * c.min_branch_length
        return total + count * (last + bridge + c.num_answers * c.max_answer_length)

    def begin(self, number: int, prompt: Prompt) -> GrowingTree:
        """A tree whose prompt has been read; its thoughts wait for their first tokens."""
        length = len(prompt.ids)
        return GrowingTree(number, prompt, self._thoughts(0, length, self.config.max_thought_length, 0), length)

    def add(self, tree: GrowingTree, branch: Branch, token: int, logprob: float, entropy: float) -> None:
        """Append a token to a branch, and decide what the branch feeds next."""
        branch.add(token, logprob, entropy)
        c = self.config
        says_end = not c.ignore_eos and (branch.tag_found or token in self.eos_ids)
        ended = says_end or len(branch.ids) >= branch.limit
        if not ended and branch.sentence == END and len(branch.ids) >= c.min_branch_length:
            branch.pieces = self._thoughts(branch.segment, branch.path, branch.limit - len(branch.ids), branch.state)
            tree.feeds.append(Feed(branch.segment, branch.path - 1, [token], branch.pieces))
        elif not ended:
            tree.feeds.append(Feed(branch.segment, branch.path - 1, [token], [branch]))
        elif branch.answers is not None:
            branch.bridge = self.tags.bridge if branch.tag_found else self.tags.bridge_unclosed
            branch.answers = self._answers(branch.segment, branch.path + len(branch.bridge))
            tree.feeds.append(Feed(branch.segment, branch.path - 1, [token, *branch.bridge], branch.answers))

    def is_closed(self, branch: Branch) -> bool:
        """A branch that has ended was ended by its tag, an answer also by an end-of-sequence id, a thought also by
        branching; not by its length.
        """
        if branch.answers is None:
            return branch.tag_found or branch.ids[-1] in self.eos_ids
        return branch.tag_found or bool(branch.pieces)

    def _thoughts(self, above: int, path: int, limit: int, state: int) -> list[Branch]:
        """Thoughts that begin where the segment `above` ends."""
        return [
            Branch(segment, path, limit, self.tags.thought, state, self.ends if self.full.branches(segment) else None)
            for segment in self.full.branches(above)
        ]

    def _answers(self, above: int, path: int) -> list[Branch]:
        segments, limit = self.full.answers(above), self.config.max_answer_length
        return [Branch(segment, path, limit, self.tags.answer, answers=None) for segment in segments]
