"""Atomic writes: after a kill or on a full disk, a file or folder is either complete or absent."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_grpo.common.errors import UserError

# Errors of the disk: full, over quota, file too large, read-only, no permission, broken
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def writing_aside(final: Path) -> Iterator[Path]:
    """A hidden folder to write into: it is synced and renamed to `final` at the end, and removed if anything fails.

    Raises: UserError where the disk refuses to write.
    """
    aside = final.with_name(f".{final.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _sync_tree(aside)
        if final.exists():  # incomplete, since complete ones are kept
            remove_whole(final)
        os.replace(aside, final)
        sync(final.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        # safetensors and tokenizers write in Rust, where a full disk is an error of their own class
        refused = isinstance(error, OSError) and error.errno in _REFUSED
        if refused or any(f"(os error {number})" in str(error) for number in _REFUSED):
            raise refusal(final, error) from error
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file's content in one step: a reader finds all of the old content or all of the new one."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def refusal(path: Path, error: BaseException) -> UserError:
    """The error to raise where the disk refuses to write `path`: it names the reason and the free space."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    parent = next(folder for folder in path.resolve().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free / 2**20
    return UserError(
        f"cannot write {path}: {reason} ({free:,.0f} MiB free there). What was saved before is untouched: "
        "free space or set output_dir or save_total_limit, then go on with resume_from_checkpoint=true"
    )


def is_aside(path: Path) -> bool:
    """Whether `path` is left over from a write or a deletion that was interrupted."""
    return path.name.startswith(".") and path.name.endswith((".writing", ".deleting"))


def remove_whole(folder: Path) -> None:
    """Delete a folder in one step: it is renamed first, so its name never shows a part of it."""
    aside = folder.with_name(f".{folder.name}.deleting")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    shutil.rmtree(aside)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
