"""Generated scenes as data of a task, for the shipped tiny model and for trying a task without any data set."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlm_grpo.errors import UserError
from vlm_grpo.task import LazySamples, Sample

if TYPE_CHECKING:
    from data_scripts.tiny_scenes import Scene

SCENES = {"train": 4096, "sft": 16384, "val": 256, "test": 512}  # split: samples where no limit is given


def scene_samples(split: str, limit: int | None, seed: int, make: Callable[["Scene"], Sample]) -> LazySamples:
    """The samples that `make` gives for the scenes of a split, whose ids it keeps. See `numbered_samples`."""

    def make_at(id_: str, index: int) -> Sample:
        from data_scripts.tiny_scenes import make_scene

        return make(make_scene(split, index, seed))

    return numbered_samples(split, limit, seed, make_at)


def numbered_samples(split: str, limit: int | None, seed: int, make: Callable[[str, int], Sample]) -> LazySamples:
    """The samples that `make` gives for each id and number of a split; scenes are drawn on access, `seed` chooses them.

    Raises UserError, naming the splits, for another split.
    """
    if split not in SCENES:
        raise UserError(f"generated scenes have no split {split!r}; they have: {', '.join(SCENES)}")
    ids = [f"{split}-{seed}-{index:06d}" for index in range(limit or SCENES[split])]
    return LazySamples(ids, lambda index: make(ids[index], index))


def check_seed(seed: object) -> None:
    """Raises UserError if task_args.seed is no whole number from 0."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"task_args.seed is {seed!r}; accepted: a whole number from 0")
