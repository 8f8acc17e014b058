"""Atomic file writes: a reader sees the old content or all of the new, whatever happens in between.

draft in the same folder -> fsync -> rename -> fsync the folder
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from truebatch.errors import CheckpointError, TruebatchError
from truebatch.io.text_encoding import read_text
from truebatch.testing.failpoints import failpoint

DRAFT = ".part"
_HASH_CHUNK = 1 << 20
_STRICT = json.JSONEncoder(allow_nan=False)
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the quota of this user is used up", "free some space or raise the quota"),
    errno.EFBIG: ("a file would become larger than allowed here", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the filesystem can only be read", "mount it for writing or choose another folder"),
    errno.EIO: ("the device reported a fault", "check the device or choose another folder"),
    errno.EEXIST: ("there is a file where the folder should be", "name another folder, or move that file away"),
    errno.ENOTDIR: ("there is a file where the folder should be", "name another folder, or move that file away"),
    errno.EACCES: ("writing here is not allowed", "check the permissions of the folder"),
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a manifest remembers of a file."""

    num_bytes: int
    sha256: str


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole; a kill at any moment leaves the old text or the new one."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file as a whole; a kill at any moment leaves the old bytes or the new ones."""
    with atomic_write(path) as file:
        file.write(data[: len(data) // 2])
        file.flush()
        failpoint("write.half_written")
        file.write(data[len(data) // 2 :])


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path` once the block has ended and all of it is on the disk.

    A block that raises leaves what was there before.
    """
    draft = _draft_of(path)
    failpoint("write.before_open")
    try:
        with draft.open("xb") as file:
            failpoint("write.opened")
            yield file
            file.flush()
            failpoint("write.written")
            os.fsync(file.fileno())
        failpoint("write.synced")
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the original error is being raised; a leftover draft is removed at the next start
            draft.unlink(missing_ok=True)
        raise
    failpoint("write.renamed")
    sync_folder(path.parent)
    failpoint("write.folder_synced")


@contextmanager
def atomic_text(path: Path) -> Iterator[TextIO]:
    """The same for text in UTF-8, with line ends as they are written: for `csv` and what comes line by line."""
    with atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()


@contextmanager
def atomic_folder(target: Path, *, keep_existing: bool = False) -> Iterator[Path]:
    """An empty folder to write into that becomes `target` once the block has ended; a reader never sees half of it.

    A folder that has this name by then is replaced, or stays if it is to be kept: another process wrote the same.
    """
    draft = _draft_of(target)
    draft.mkdir()
    try:
        yield draft
        failpoint("folder.written")
        if not keep_existing:
            shutil.rmtree(target, ignore_errors=True)
            failpoint("folder.old_removed")
        try:
            draft.rename(target)
        except OSError:
            if not (keep_existing and target.is_dir()):
                raise
        failpoint("folder.renamed")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def apply_umask(folder: Path) -> None:
    """Give the weights in a folder the permissions that new files have here: safetensors keeps its files to their owner."""
    probe = folder / f".{uuid.uuid4().hex[:8]}{DRAFT}"
    probe.touch(exist_ok=False)
    try:
        permissions = probe.stat().st_mode & 0o777
    finally:
        probe.unlink()
    for file in folder.rglob("*.safetensors"):
        if file.is_file() and not file.is_symlink():
            file.chmod(permissions)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{DRAFT}")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole. NaN and infinity are rejected because JSON has neither."""
    write_text(path, to_json(value, indent=1) + "\n")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text in ASCII, so that no name or path can make it unwritable."""
    return _STRICT.encode(value) if indent is None else json.dumps(value, allow_nan=False, indent=indent)


def read_json(path: Path, *, max_bytes: int = 1 << 30) -> Any:
    """The value of a JSON file; what is missing, too large or not JSON raises a `TruebatchError`."""
    text = read_text(path, max_bytes=max_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is not JSON",
            seen=f"{path}: {error}",
            do="restore the file from a backup, or go back to an earlier checkpoint",
        ) from error


@contextmanager
def corrupt_file_errors(path: Path, *, do: str = "restore the file from a backup") -> Iterator[None]:
    """Wrap code that parses a file's values, so that an unexpected value raises an error that names the file."""
    try:
        yield
    except TruebatchError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not have the expected content", seen=f"{type(error).__name__}: {str(error)[:200]}", do=do
        ) from error


def write_chunks(path: Path, chunks: Iterable[Any]) -> FileFacts:
    """Write a new checkpoint file chunk by chunk, fsync it, and hash it on the way."""
    digest = hashlib.sha256()
    num = 0
    with path.open("xb", buffering=0) as file:
        failpoint("checkpoint.file_opened")
        for chunk in chunks:
            digest.update(chunk)
            num += _write_all(file, memoryview(chunk).cast("B"))
            failpoint("checkpoint.file_begun")
        failpoint("checkpoint.file_written")
        os.fsync(file.fileno())
    failpoint("checkpoint.file_synced")
    return FileFacts(num, digest.hexdigest())


def _write_all(file: Any, data: memoryview) -> int:
    # An unbuffered write may write less than it is given: Linux takes at most 2 GiB per call.
    done = 0
    while done < len(data):
        done += file.write(data[done:])
    return done


def hash_file(path: Path) -> FileFacts:
    """Size and SHA-256 of a file on disk."""
    digest = hashlib.sha256()
    num = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            num += len(chunk)
    return FileFacts(num, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its entries are on disk, where the system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network filesystems cannot sync a folder and say so; they order renames on the server.
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    """Bytes this user may still write to the filesystem of a folder (quotas are not known here)."""
    return shutil.disk_usage(folder).free


def require_space(folder: Path, num_bytes: int, *, what: str) -> None:
    """Refuse to begin a write for which the filesystem has no room."""
    free = free_bytes(folder)
    if free < num_bytes:
        raise CheckpointError(
            f"the disk is full: {what} does not fit",
            seen=f"{num_bytes:,} bytes needed, {free:,} free in {folder}",
            do="free some space, then run the same command again; it resumes from the last checkpoint",
        )


def storage_error(
    kind: type[TruebatchError], error: OSError, *, what: str, folder: Path, num_bytes: int = 0
) -> TruebatchError:
    """Turn a system error into three parts: what could not be written and why, bytes needed and free, what to do."""
    why, do = _CAUSES.get(error.errno or 0, ("the system refused", "check the folder and its filesystem"))
    needed = f"; {num_bytes:,} bytes needed, {_free_words(folder)} free" if num_bytes else ""
    return kind(
        f"{what} could not be written: {why}",
        seen=f"{error}{needed}, in {folder}",
        do=f"{do}, then run the same command again; it resumes from the last checkpoint",
    )


def _free_words(folder: Path) -> str:
    try:
        return f"{free_bytes(folder):,}"
    except OSError:
        return "an unknown number"


def remove_drafts(folder: Path) -> None:
    """Delete drafts that a killed process left behind. Only the owner of the folder may call this."""
    for draft in folder.glob(f".*{DRAFT}"):
        if draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)
