"""Generated scenes as the data of a task, for the shipped tiny model and for trying a task without a data set."""

from collections.abc import Callable

from tasks._generated.scenes import Scene, make_scene
from tasks._rows import check_limit
from vlm_grpo.task import LazySamples, Sample, UserError

SCENES = {"train": 4096, "sft": 16384, "val": 256, "test": 512}  # split: samples where no limit is given


def scene_samples(split: str, limit: int | None, seed: int, make: Callable[[Scene], Sample]) -> LazySamples:
    """The samples that `make` returns for the scenes of a split; it keeps the scenes' ids. See `numbered_samples`."""

    def make_at(id_: str, index: int) -> Sample:
        return make(make_scene(split, index, seed))

    return numbered_samples(split, limit, seed, make_at)


def numbered_samples(split: str, limit: int | None, seed: int, make: Callable[[str, int], Sample]) -> LazySamples:
    """The samples that `make(id, number)` returns for a split, on access. `seed` chooses the scenes.

    Raises: UserError for an unknown split; it names the known ones.
    """
    if split not in SCENES:
        raise UserError(f"generated scenes have no split {split!r}; they have: {', '.join(SCENES)}")
    ids = [f"{split}-{seed}-{index:06d}" for index in range(limit or SCENES[split])]
    return LazySamples(ids, lambda index: make(ids[index], index))


def checked_source(
    task: str, data: str | None, limit: object, question: str, field: str, seed: object
) -> tuple[str, str]:
    """The `data` of a task that reads a folder or generated scenes, and its name for the metric note.

    `question` must contain `field`, such as "{need}".

    Raises: UserError for arguments that cannot be used.
    """
    if data is None:
        raise UserError(
            f"task {task} has no data. Give task_args.data: a folder made by `python -m data_scripts.{task}`, or "
            "'scenes' for generated coloured shapes."
        )
    check_limit(limit)
    check_seed(seed, data)
    check_question(question, field)
    return data, "generated scenes" if data == "scenes" else data


def check_question(question: str, field: str) -> None:
    """Raise UserError if task_args.question does not contain the placeholder `field`."""
    if field not in question:
        raise UserError(f"task_args.question is {question!r}; it must hold {field}")


def check_seed(seed: object, data: str | None = "scenes") -> None:
    """Raise UserError if task_args.seed is no whole number from 0, or is set although `data` has no scenes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"task_args.seed is {seed!r}; accepted: a whole number from 0")
    if seed and data != "scenes":
        raise UserError(
            f"task_args.seed is {seed}, which chooses generated scenes, and task_args.data is {data!r}: leave seed out"
        )
