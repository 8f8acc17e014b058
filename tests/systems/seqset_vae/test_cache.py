"""Large datasets are read once, and read again when a file or a setting changes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.systems.seqset_vae.folders import CLEAN, write_folder
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data import cache
from truebatch_systems.seqset_vae.data import prepare as loading
from truebatch_systems.seqset_vae.data.prepare import prepare


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """How often the files themselves were read, with a cache of its own and no memory of earlier reads."""
    counted = []
    read_source = loading.read_source

    def read(config, findings):
        counted.append(config.data)
        return read_source(config, findings)

    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE_FILES", 3)
    monkeypatch.setattr(loading, "read_source", read)
    return counted


def again(config):
    loading._prepare.cache_clear()
    return prepare(config)


@pytest.mark.parametrize("has_vectors", [True, False])
def test_kept_stays_are_those_of_the_files_and_faults_are_told_again(reads, tmp_path, has_vectors):
    stays = {**CLEAN, "200001.0": [*CLEAN["200001.0"], ("HR", 1.0, -3.0)]}
    root = write_folder(tmp_path / "data", stays)
    if not has_vectors:
        (root / "cached.csv").unlink()
    config = SeqSetConfig(data=str(root))
    first, second = again(config), again(config)
    assert len(reads) == 1
    assert first.lines == second.lines
    assert any("an event before admission: 1" in line for line in second.lines)
    for split in first.splits:
        for name in ("var", "val", "set_minute", "set_size", "labels"):
            np.testing.assert_array_equal(getattr(first.splits[split], name), getattr(second.splits[split], name))


def test_a_changed_file_a_changed_setting_and_a_damaged_copy_are_read_anew(reads, tmp_path):
    root = write_folder(tmp_path / "data")
    config = SeqSetConfig(data=str(root))
    again(config)
    again(SeqSetConfig(data=str(root), max_sets=2))
    assert len(reads) == 1
    again(SeqSetConfig(data=str(root), drop_faulty=True))
    assert len(reads) == 2
    write_folder(root, {**CLEAN, "200001.0": CLEAN["200001.0"][:2]})
    assert again(config).train.num_events.tolist() == [2, 4, 4, 4]
    assert len(reads) == 3
    for file in (tmp_path / "cache").rglob("val.npy"):
        file.write_bytes(file.read_bytes()[:-4])
    assert again(config).train.num_events.tolist() == [2, 4, 4, 4]
    assert len(reads) == 4
