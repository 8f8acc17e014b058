"""The budget of a run is found by measuring, holds what it promises, and stays with the run."""

from __future__ import annotations

import gc

import pytest

from tests.scoring.judges import questions, text_judge
from truebatch.errors import RunError
from truebatch.generation.config import Generation
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import DEFAULT_CELLS, Limits, load_batches, plan_batches
from truebatch.scoring.inputs.read_samples import read_requests
from truebatch.scoring.memory_budget import BUDGET, fit_cells, settle_limits
from truebatch.scoring.readouts import Generate, Labels
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.scorer import Scorer
from truebatch.scoring.store.manifest import read_manifest
from truebatch.training.memory.measure import added_bytes

LABELS = Labels({"a": 1, "b": 0})
TEXT = Generate(Generation(max_new_tokens=4, temperature=0))
pytestmark = pytest.mark.xdist_group("scoring-models")


@pytest.fixture(scope="module")
def judge():
    return text_judge()


def test_no_batch_under_the_budget_takes_more_than_there_is_and_the_room_is_used(judge, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # nothing here is held by a cycle, and it is slow after many tests
    backend = model_backend(*judge, TEXT, Limits(), reuse_prefix=False)
    asked = list(read_requests(questions(24)))
    room = 2_000_000
    cells = fit_cells(backend, asked, limit_bytes=room)
    costs = {one.id: backend.cost(one) for one in asked}
    prepared = {one.id: backend.prepare(one) for one in asked}
    batches = plan_batches(costs, Limits(cells=cells))
    device = next(judge[0].parameters()).device
    dearest = sorted(batches, key=lambda b: -len(b) * max(costs[k].tokens for k in b))[:3]
    taken = [added_bytes(lambda b=batch: backend.judge([prepared[k] for k in b]), device=device) for batch in dearest]
    assert max(taken) <= room
    assert max(taken) > 0.5 * room


def test_what_was_measured_is_kept_for_later_runs_of_the_same_judge(judge, tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(gc, "collect", lambda: 0)
    asked = list(read_requests(questions(24)))
    backend = model_backend(*judge, LABELS, Limits(), reuse_prefix=False)
    cells = fit_cells(backend, asked, limit_bytes=2_000_000)
    judged = []
    again = model_backend(*judge, LABELS, Limits(), reuse_prefix=False)
    monkeypatch.setattr(type(again), "judge", lambda self, prepared: judged.append(prepared))
    assert fit_cells(again, asked, limit_bytes=2_000_000) == cells
    assert fit_cells(again, asked, limit_bytes=1_000_000) < cells
    assert not judged
    monkeypatch.undo()
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path))
    other = model_backend(*judge, TEXT, Limits(), reuse_prefix=False)
    fit_cells(other, asked, limit_bytes=2_000_000)
    assert len(list((tmp_path / "score_budgets").iterdir())) == 2  # another readout is measured by itself
    next((tmp_path / "score_budgets").iterdir()).write_text("{")
    assert fit_cells(backend, asked, limit_bytes=2_000_000) > 0


def test_on_a_cpu_and_without_samples_nothing_is_measured(judge):
    backend = model_backend(*judge, LABELS, Limits())
    assert fit_cells(backend, list(read_requests(questions(3)))) is None
    assert fit_cells(backend, list(read_requests([{"user": "x" * 5000}])), limit_bytes=10**6) is None
    assert Limits().most_cells == DEFAULT_CELLS


def test_a_budget_that_was_measured_stays_with_the_run(tmp_path):
    found = settle_limits(Limits(), tmp_path, lambda: 777)
    assert found.cells == 777
    assert (tmp_path / BUDGET).is_file()
    assert settle_limits(Limits(), tmp_path, lambda: 999).cells == 777
    assert settle_limits(Limits(cells=5), tmp_path, lambda: 999).cells == 5


def test_a_pinned_shape_does_not_depend_on_the_card(tmp_path):
    assert settle_limits(Limits(level="shape"), tmp_path, lambda: 777).most_cells == DEFAULT_CELLS


def test_a_run_goes_on_with_the_budget_it_began_with(tmp_path):
    data = [{"user": f"{n:02d}" + "x" * n} for n in range(30)]
    how = RunConfig(threads=1)
    Scorer(ScriptedBackend(), limits=Limits(cells=90)).score(data[:20], tmp_path, check=False, how=how)
    Scorer(ScriptedBackend()).score(data, tmp_path, check=False, how=how)
    assert read_manifest(tmp_path).fields["sameness"]["cells"] == 90
    assert all(len(batch) * 3 <= 90 for batch in load_batches(tmp_path).batches)
    with pytest.raises(RunError, match="another configuration"):
        Scorer(ScriptedBackend(), limits=Limits(cells=91)).score(data, tmp_path, check=False, how=how)
