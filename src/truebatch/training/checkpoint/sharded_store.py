"""A checkpoint that all ranks write together: each its rows, rank 0 everything else, and one manifest over all files.

rank 0: stage -> all: their files, fsync -> rank 0: values, manifest, rename -> all know that it is there

No tensor is gathered, and no rank waits for more than the slowest file. What one rank cannot write stops all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from truebatch.io.atomic_files import FileFacts, sync_folder, to_json, write_chunks
from truebatch.training.checkpoint.manifest import SHARDS
from truebatch.training.checkpoint.pytree import Packed
from truebatch.training.checkpoint.retention import SavedCheckpoint, prune_after
from truebatch.training.checkpoint.shard_files import row_table, shard_file
from truebatch.training.checkpoint.store import (
    Checkpoint,
    begin_save,
    bytes_of,
    commit_files,
    make_stage,
    new_stage,
    nonfinite_in,
    pack_parts,
    storage_errors,
    write_files,
)
from truebatch.training.checkpoint.tensor_files import num_bytes, write_tensors
from truebatch.training.distributed.collectives import (
    all_gather_list,
    broadcast_from_rank0,
    num_ranks,
    on_every_rank,
    rank,
)


def save_sharded_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> SavedCheckpoint:
    """Write a checkpoint as `folder/step-N` from all ranks, with the promises of `save_checkpoint`."""
    packed = pack_parts(checkpoint, keep=keep)
    own = {name: {key: one.rows for key, one in part.shards.items()} for name, part in packed.items()}
    nonfinite = list(dict.fromkeys(all_gather_list(nonfinite_in(packed if rank() == 0 else _only_rows(packed)))))
    needed = bytes_of(packed) + sum(all_gather_list([sum(num_bytes(rows) for rows in own.values())]))
    rows = all_gather_list([{n: {key: t.shape[0] for key, t in mine.items()} for n, mine in own.items()}])
    stage = Path(broadcast_from_rank0(str(new_stage(folder, checkpoint.step)) if rank() == 0 else ""))

    def begin() -> None:
        with storage_errors(checkpoint, folder, needed):
            begin_save(folder, checkpoint, nonfinite, needed)
            make_stage(stage)

    def write() -> dict[str, FileFacts]:
        with storage_errors(checkpoint, folder, needed):
            return _write_own(stage, own_rows=packed)

    def finish(files: Mapping[str, FileFacts]) -> SavedCheckpoint:
        with storage_errors(checkpoint, folder, needed):
            tables = {n: row_table(part.shards, [here[n] for here in rows]) for n, part in packed.items()}
            text = to_json({n: table for n, table in tables.items() if table})
            about = {SHARDS: write_chunks(stage / SHARDS, [text.encode()])}
            saved = commit_files(stage, checkpoint, {**files, **about, **write_files(stage, packed)}, nonfinite)
        return prune_after(folder, saved, keep=keep)

    try:
        on_every_rank(lambda: begin() if rank() == 0 else None)
        written = on_every_rank(write)
        files = {name: facts for mine in written for name, facts in mine.items()}
        saved = on_every_rank(lambda: finish(files) if rank() == 0 else None)[0]
    except BaseException:
        if rank() == 0:
            shutil.rmtree(stage, ignore_errors=True)  # what cannot be removed now goes at the next start
        raise
    assert saved is not None
    return saved


def _only_rows(packed: Mapping[str, Packed]) -> dict[str, Packed]:
    """Without the whole tensors, which every rank has and rank 0 looks at."""
    return {name: Packed(part.values, {}, part.shards) for name, part in packed.items()}


def _write_own(stage: Path, *, own_rows: Mapping[str, Packed]) -> dict[str, FileFacts]:
    """The files of this rank, one for each part that has rows."""
    files = {}
    for name, part in own_rows.items():
        if part.shards:
            file = shard_file(name, rank(), num_ranks())
            files[file] = write_tensors(stage / file, {key: one.rows for key, one in part.shards.items()})
    sync_folder(stage)
    return files
