"""Parts of the vlm_pruning benchmark can be measured alone, and a partial result says which it has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.pages.tables import missing_origin
from benchmarks.vlm_pruning import run
from benchmarks.vlm_pruning.run import LOADED_STEPS, PARTS, PruningBenchConfig, make_config, run_pruning
from benchmarks.vlm_pruning.workload import Work, repeated
from truebatch.errors import ConfigError


def test_loading_alone_is_measured_in_the_steps_of_the_plain_rows(tmp_path, monkeypatch):
    seen = []
    planned_steps = run.planned_steps

    def watch(work, *, per_step, **kwargs):
        seen.append((per_step, len(work.samples)))
        return planned_steps(work, per_step=per_step, **kwargs)

    monkeypatch.setattr(run, "planned_steps", watch)
    threads = torch.get_num_threads()
    config = make_config(quick=True, only="loading", fitted=3, seconds=1e9)
    run_pruning(config, out=tmp_path / "out.json", say=lambda _: None)
    torch.set_num_threads(threads)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["parts"] == ["loading"]
    assert written["fitted_samples"] == 3
    assert missing_origin(written) == []
    assert len(written["rows"]) == 4
    assert all(row["way"].endswith("with loading") for row in written["rows"])
    assert seen == [(config.samples_per_step, LOADED_STEPS * config.samples_per_step)] * 4


def test_all_parts_are_measured_unless_some_are_named():
    assert make_config(quick=True).parts == PARTS
    assert make_config(quick=True, only="note, training").parts == ("training", "note")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": "loadin"}, "no such part; did you mean 'loading'"),
        ({"only": "loading", "fitted": 0}, "a sample at least"),
    ],
)
def test_parts_and_budgets_that_do_not_exist_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        make_config(**given)


@pytest.mark.parametrize("parts", [("loading",), ("further", "note")])
def test_a_part_that_needs_the_fitted_budget_is_refused_without_it(parts):
    with pytest.raises(ConfigError, match="needs the number of samples"):
        run.refuse_unfitted(PruningBenchConfig(fitted=None, parts=parts))
    run.refuse_unfitted(PruningBenchConfig(fitted=None, parts=("training", *parts)))
    run.refuse_unfitted(PruningBenchConfig(fitted=7, parts=parts))


def test_samples_are_repeated_with_their_lengths():
    work = Work(None, None, None, [{"id": "a"}, {"id": "b"}], np.array([3, 5]))
    longer = repeated(work, 5)
    assert [sample["id"] for sample in longer.samples] == ["a", "b", "a", "b", "a"]
    assert longer.lengths.tolist() == [3, 5, 3, 5, 3]
