"""Your own questions with images and answers, in files of common formats, with a reward that you choose.

| form | keys of a row |
|---|---|
| question and answer | `question` or `problem` or `query`; `answer` or `solution` or `response` |
| conversations (VLM-R1, LLaVA) | `conversations` of `from`/`value`; `accu_reward_method` names the reward |
| messages (ms-swift) | `messages` of `role`/`content`; `solution`, or the assistant's text |
| verl | `prompt` of `role`/`content`; `reward_model.ground_truth`; `data_source` |

A row also has `image` or `images` (a path, bytes, or a list of them; none for text-only questions), and may have `id`,
and `options` or `choices`. Files are .jsonl, .json (an array), .parquet, or a .yaml manifest of such files. The keys of
a file's first row decide its form, and all its rows must have that form.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path

from tasks._formats import ACCEPTED, Row, RowImages, form_of, read_row
from tasks._rewards import REWARDS, Target, own_reward, read_target
from tasks._rows import check_limit
from tasks._scenes import check_seed
from tasks._tables import SUFFIXES, Part, open_parts
from vlm_grpo.scoring.mathematics import load_math_verify, option_letters
from vlm_grpo.task import LazySamples, Reward, Sample, TaskAdapter, UserError

TIMEOUT_S = 10.0


class Jsonl(TaskAdapter):
    """A task of your own questions; `reward` names the reward, from 0 to 1.

    `data` is a folder with {split}.jsonl (or .json, .parquet, .yaml), or one file. `held_out` is the share of a file's
    rows that make the split `val`; their ids choose them, or their positions if they have no ids. The other rows are
    `train`. Without `held_out` there is no `val`: the splits `train` and `all` (for evaluation) both hold all rows.
    Image paths are relative to `data_root`; without it, to the manifest's root, or else to the folder of the rows'
    file. Without `reward`, rows may name their own (VLM-R1's accu_reward_method, verl's data_source). `question` is a
    text around each question, which contains {question}. `limit` is the maximum number of samples of a split. `seed`
    chooses the rows of a manifest's random sample. Boxes and points in answers are in pixels of the row's only image.
    """

    def __init__(
        self,
        data: str | None = None,
        reward: str | None = None,
        data_root: str | None = None,
        question: str = "{question}",
        limit: int | None = None,
        seed: int = 0,
        held_out: float = 0.0,
    ):
        if data is None:
            raise UserError(f"task jsonl has no data. Give task_args.data: a file or folder. Rows are {ACCEPTED}.")
        if reward is not None and reward not in REWARDS:
            raise UserError(f"task_args.reward is {reward!r}; accepted: {', '.join(REWARDS)}")
        if "{question}" not in question:
            raise UserError(f"task_args.question is {question!r}; it must hold {{question}}")
        if data_root is not None and not Path(data_root).is_dir():
            raise UserError(f"task_args.data_root is {data_root!r}, which is no folder")
        check_limit(limit)
        check_seed(seed)
        if isinstance(held_out, bool) or not isinstance(held_out, int | float) or not 0 <= held_out < 1:
            raise UserError(
                f"task_args.held_out is {held_out!r}; accepted: a share of a file's rows, from 0 to below 1"
            )
        if held_out and Path(data).is_dir():
            raise UserError(
                f"task_args.held_out={held_out} divides one file; task_args.data is the folder {data!r}, whose files "
                "are its splits."
            )
        self.held_out = held_out
        self.data, self.reward_name, self.question, self.limit, self.seed = Path(data), reward, question, limit, seed
        self.data_root = None if data_root is None else Path(data_root)
        forms, rewards = self._look_at(self._any_file())
        kinds = {REWARDS[name].coordinates for name in rewards}
        if len(kinds) > 1:
            raise UserError(f"{data}: the rewards {', '.join(rewards)} mix words and positions; give task_args.reward")
        self._has_coordinates = kinds == {True}
        self._may_hang = reward is None or REWARDS[reward].may_hang
        about = "; ".join(f"{name}: {REWARDS[name].about}" for name in rewards)
        self.metric_note = f"reward: {about}; form of the rows: {', '.join(forms)}; data: {data}"

    @property
    def coordinates(self) -> bool:  # type: ignore[override]  of the rewards, not of the class
        return self._has_coordinates

    @property
    def reward_timeout_s(self) -> float | None:  # type: ignore[override]
        return TIMEOUT_S if self._may_hang else None

    def _any_file(self) -> Path:
        """One of the task's files, to find the form from its first row."""
        if self.data.is_dir():
            files = sorted(path for path in self.data.iterdir() if path.suffix in SUFFIXES)
            if not files:
                raise UserError(f"task_args.data is {str(self.data)!r}, which holds no file in {', '.join(SUFFIXES)}.")
            return next((path for path in files if path.stem == "train"), files[0])
        if not self.data.is_file() or self.data.suffix not in SUFFIXES:
            raise UserError(
                f"task_args.data is {str(self.data)!r}, which is no folder and no file in {', '.join(SUFFIXES)}."
            )
        return self.data

    def _look_at(self, path: Path) -> tuple[list[str], list[str]]:
        """The forms of the files that `path` stands for, and the rewards that their first rows name."""
        forms, rewards = [], []
        for part in open_parts(path, self.data_root, self.seed):
            if len(part.indices) == 0:
                continue
            form = self._form(part)
            target = self._target(self._row(part, form, part.indices[0]), part.table.where(part.indices[0]))
            forms.append(form)
            rewards.append(target.reward)
        if not forms:
            raise UserError(f"{path}: it holds no rows.")
        return list(dict.fromkeys(forms)), list(dict.fromkeys(rewards))

    def _form(self, part: Part) -> str:
        first = part.table.row(part.indices[0])
        form = form_of(first)
        if form is None:
            where = part.table.where(part.indices[0])
            nothing = [key for key, value in first.items() if value is None]
            empty = f" (of which {', '.join(nothing)} hold nothing)" if nothing else ""
            raise UserError(
                f"{where}: no known form of row; its keys are {', '.join(first)}{empty}. Accepted: {ACCEPTED}."
            )
        return form

    def _row(self, part: Part, form: str, index: int) -> Row:
        return read_row(part.table.row(index), form, part.table.where(index))

    def _target(self, row: Row, where: str) -> Target:
        name = self.reward_name or own_reward(row)
        if name is None:
            named = row.more.get("reward") or row.more.get("source")
            unknown = f": {named!r} is no name known here" if named else ""
            raise UserError(
                f"{where}: the row does not say how it is scored{unknown}; give task_args.reward: {', '.join(REWARDS)}"
            )
        try:
            return read_target(row, name)
        except ValueError as error:
            raise UserError(f"{where}: {error}.") from error

    def samples(self, split: str) -> Sequence[Sample]:
        ids: list[str] = []
        keys: list[str] = []  # the same whatever the split
        places: list[tuple[Part, str, int]] = []
        parts = open_parts(self._file(split), self.data_root, self.seed)
        for number, part in enumerate(parts):
            if not len(part.indices):
                continue
            form = self._form(part)
            own = part.table.ids()
            stem = part.table.path.stem
            for index in part.indices:
                prefix = f"{stem}-{number}-" if len(parts) > 1 else "" if own[index] else f"{split}-"
                ids.append(f"{prefix}{own[index] or index}")
                keys.append(f"{stem if len(parts) > 1 else ''}-{own[index] or index}")
                places.append((part, form, index))
        if self.held_out:
            chosen = [at for at, held in enumerate(_held_out(keys, self.held_out)) if held == (split == "val")]
            ids, places = [ids[at] for at in chosen], [places[at] for at in chosen]
        ids = ids[: self.limit]

        def make(at: int) -> Sample:
            part, form, index = places[at]
            where = part.table.where(index)
            row = self._row(part, form, index)
            target = self._target(row, where)
            if REWARDS[target.reward].coordinates != self._has_coordinates:
                kind = "positions" if self._has_coordinates else "words"
                raise UserError(
                    f"{where}: its reward is {target.reward}, and the first row's is of {kind}; give task_args.reward, "
                    "or files of their own."
                )
            listed = "" if _are_shown(target.options, row.question) else _listed(target.options)
            question = self.question.replace("{question}", row.question + listed)
            return Sample(ids[at], RowImages(row.images, part.table.root, where), question, target)

        return LazySamples(ids, make)

    def _file(self, split: str) -> Path:
        if not self.data.is_dir():
            self._check_split_of_file(split)
            return self.data
        found = [path for path in (self.data / f"{split}{suffix}" for suffix in SUFFIXES) if path.is_file()]
        if not found:
            there = ", ".join(sorted({path.stem for path in self.data.iterdir() if path.suffix in SUFFIXES}))
            raise UserError(f"{self.data} has no file {split}.jsonl; splits there: {there}.")
        if len(found) > 1:
            raise UserError(
                f"{self.data} has several files of split {split!r}: {', '.join(p.name for p in found)}. Leave one."
            )
        return found[0]

    def _check_split_of_file(self, split: str) -> None:
        if split in (("train", "val") if self.held_out else ("train", "all")):
            return
        advice = "give a folder with a file for each split as task_args.data"
        if split == "val":
            raise UserError(
                f"{self.data} is one file, and none of its rows are held out as val. Give task_args.held_out=0.1 for a "
                f"tenth of them, or {advice}. To train without held-out rows give an empty eval_split=; to evaluate "
                "all rows, split=all."
            )
        there = "train and val" if self.held_out else "train, all, and with task_args.held_out val"
        raise UserError(f"{self.data} is one file, which has no split {split!r}; its splits: {there}. Or {advice}.")

    def reward(self, sample: Sample, answer: str) -> Reward:
        target: Target = sample.target
        value = REWARDS[target.reward].score(answer, target)
        return Reward(value, {target.reward: value})

    def prepare_reward(self) -> None:
        load_math_verify()

    def overdue_reward(self, sample: Sample) -> Reward:
        return Reward(0.0, {sample.target.reward: 0.0})

    def reference_answer(self, sample: Sample) -> str:
        return REWARDS[sample.target.reward].reference(sample.target)


def _held_out(keys: Sequence[str], share: float) -> list[bool]:
    """Whether each row is held out: the `share`, rounded up, with the smallest digests. Equal keys stay together."""
    digests = [hashlib.blake2b(key.encode(errors="backslashreplace"), digest_size=8).digest() for key in keys]
    last = sorted(digests)[math.ceil(share * len(keys)) - 1] if keys else b""
    return [digest <= last for digest in digests]


def _are_shown(options: Sequence[str], question: str) -> bool:
    """Whether a question already lists each option behind its letter, such as "B. red" or "(B) red"."""
    return all(
        re.search(rf"(?<!\w){letter}\s*[.):\]]\s*{re.escape(option)}(?!\w)", question)
        for letter, option in zip(option_letters(26), options, strict=False)
    )


def _listed(options: Sequence[str]) -> str:
    return "".join(f"\n({letter}) {option}" for letter, option in zip(option_letters(26), options, strict=False))
