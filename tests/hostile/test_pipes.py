"""A pipe that nobody writes to, in the place of a file: whoever opens it for reading waits for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from truebatch.errors import TruebatchError
from truebatch.planning.plan_file import load_plan
from truebatch.scoring.store.content_key import sample_key
from truebatch.scoring.store.input_index import load_list, save_list
from truebatch.training.logging.metrics_jsonl import find_gaps, open_metrics, read_metrics
from truebatch_systems.stitched_llm.model.save_load import load_stitched

READERS = {
    "plan.bin": lambda folder: load_plan(folder / "plan.bin"),
    "metrics.jsonl": lambda folder: read_metrics(folder / "metrics.jsonl"),
    "gaps/metrics.jsonl": lambda folder: find_gaps(folder / "gaps" / "metrics.jsonl", step=3),
    "open/metrics.jsonl": lambda folder: open_metrics(folder / "open" / "metrics.jsonl", step=3),
    "input.jsonl": load_list,
    "stitch_config.json": load_stitched,
    "a.png": lambda folder: sample_key({"prompt": "x"}, [folder / "a.png"]),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path: Path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(TruebatchError):
        READERS[name](tmp_path)


def test_a_list_of_samples_is_written_over_a_pipe(tmp_path: Path):
    os.mkfifo(tmp_path / "input.jsonl")
    save_list(tmp_path, [])
    assert (tmp_path / "input.jsonl").is_file()
