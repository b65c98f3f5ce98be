"""Checks a task adapter: its samples, its rewards, and the whole adapter before training."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.images import open_image
from vlm_grpo.task.interface import LazySamples, Reward, Sample, Samples, TaskAdapter, describe, task_name

JUNK_ANSWERS = (
    "",
    " \n\t",
    "I cannot tell.",
    "[",
    "]]})",
    "[nan, nan, inf, -inf]",
    "<answer></answer>",
    '{"answer": null}',
    "\x00\ud800 \N{ZERO WIDTH SPACE}\N{PILE OF POO}",
    "((((" * 500,
)


def score(adapter: TaskAdapter, sample: Sample, answer: str) -> Reward | None:
    """The adapter's reward for an answer, checked; None if the adapter returns None or a value that is not finite.

    Raises: UserError, naming task and sample, if the adapter crashes or returns anything else.
    """
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    try:
        reward = adapter.reward(sample, answer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # an adapter is foreign code: whatever it raises becomes one message
        raise UserError(
            f"{where}: reward() raised {describe(error, type(adapter))} for the answer {_short(answer)}. "
            "reward() must give a Reward for any text."
        ) from error
    if reward is None:
        return None
    if not isinstance(reward, Reward):
        raise UserError(f"{where}: reward() returned {_short(reward)}; return Reward(value=...) or None.")
    value = _number(reward.value, f"{where}: Reward.value")
    if not math.isfinite(value):
        return None
    if not isinstance(reward.parts, Mapping):
        raise UserError(f"{where}: Reward.parts is {_short(reward.parts)}; it must map names to numbers.")
    parts = {part: _number(number, f"{where}: Reward.parts[{part!r}]") for part, number in reward.parts.items()}
    return Reward(value, parts)


def check_samples(samples: Samples, split: str) -> None:
    """Raise UserError if the split is empty, an id is no text, or two samples share an id. Opens no image."""
    if len(samples) == 0:
        raise UserError(f"split {split!r} is empty: there is nothing to work on. Check task_args and the data files.")
    first_at: dict[str, int] = {}
    for index, sample_id in enumerate(samples.ids if isinstance(samples, LazySamples) else map(_id, samples)):
        if not isinstance(sample_id, str):
            raise UserError(f"split {split!r}: item {index} has the id {sample_id!r}; ids are text.")
        if sample_id in first_at:
            raise UserError(
                f"split {split!r}: the id {sample_id!r} stands at items {first_at[sample_id]} and {index}. "
                "Ids must be unique, since rollouts and predictions are recorded under them."
            )
        first_at[sample_id] = index


def check_task(adapter: TaskAdapter, split: str = "train", limit: int = 64) -> None:
    """Check a task before training: print one line on what was checked, or raise UserError at the first fault.

    All ids of the split must differ. For each of the first `limit` samples, the images must open, the reference answer
    must earn `full_marks`, and each junk answer must earn less than half of them, or None, and raise nothing. The
    metrics of the reference answers, computed at the end, must contain the headline.
    """
    samples = adapter.samples(split)
    check_samples(samples, split)
    checked = [samples[index] for index in range(min(limit, len(samples)))]
    answers: list[str] = []
    rewards: list[Reward] = []
    for sample in checked:
        _check_images(adapter, sample)
        answers.append(adapter.reference_answer(sample))
        rewards.append(_check_marks(adapter, sample, answers[-1]))
    metrics = adapter.metrics(checked, answers, rewards)
    if adapter.headline not in metrics and not any(adapter.headline in reward.parts for reward in rewards):
        raise UserError(
            f"task {task_name(adapter)}: headline is {adapter.headline!r}, but the metrics are {sorted(metrics)}."
        )
    print(
        f"task {task_name(adapter)}: {len(samples)} samples of {split!r} with ids of their own; of the first "
        f"{len(checked)} the images open, the reference answers score full marks, and junk scores little"
    )


def _id(sample: Sample) -> str:
    if not isinstance(sample, Sample):
        raise UserError(f"samples() holds {_short(sample)}; it must give Sample objects.")
    return sample.id


def _check_images(adapter: TaskAdapter, sample: Sample) -> None:
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    if isinstance(sample.images, str) or not isinstance(sample.images, Sequence):
        raise UserError(f"{where}: images is {_short(sample.images)}; it must be a list of paths or images.")
    if adapter.coordinates and len(sample.images) != 1:
        raise UserError(
            f"{where}: has {len(sample.images)} images; a task with coordinates=True has exactly one image per sample, "
            "the one whose pixels are meant."
        )
    for image in sample.images:
        open_image(image, f"{where}: the image {image}")


def _check_marks(adapter: TaskAdapter, sample: Sample, reference: str) -> Reward:
    where = f"task {task_name(adapter)}, sample {sample.id!r}"
    if not isinstance(reference, str):
        raise UserError(f"{where}: reference_answer() returned {_short(reference)}; it must be text.")
    gold = score(adapter, sample, reference)
    if gold is None or abs(gold.value - adapter.full_marks) > 1e-3 * max(1.0, abs(adapter.full_marks)):
        got = "no reward" if gold is None else f"{gold.value:g}"
        raise UserError(
            f"{where}: the reference answer {_short(reference)} scores {got} where full marks are "
            f"{adapter.full_marks:g}. Correct reward() or reference_answer(), or set full_marks."
        )
    for junk in JUNK_ANSWERS:
        reward = score(adapter, sample, junk)
        if reward is None and adapter.reward(sample, junk) is not None:
            raise UserError(
                f"{where}: the reward of the junk answer {_short(junk)} is no finite number; give one, or None for an "
                "answer that cannot be judged."
            )
        if reward is not None and reward.value >= adapter.full_marks / 2:
            raise UserError(
                f"{where}: the junk answer {_short(junk)} scores {reward.value:g}; reward() is too generous."
            )
    return gold


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{what} is {_short(value)}; it must be a number (write float(...)).")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if isinstance(value, str) or value is None else f"{text} ({type(value).__name__})"
