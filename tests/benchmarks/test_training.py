"""The training benchmark compares like with like, says what it left out, and its ratios are of what they say."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.harness.result_file import check_can_keep
from benchmarks.model_shapes import SHAPES, build_model, matrix_flops_per_token
from benchmarks.training import rounds, timing
from benchmarks.training import run as training
from benchmarks.training.config import Case, TrainingBenchConfig, make_config
from benchmarks.training.methods import EVERY_CASE, OWN, all_ways, compare_gradients
from benchmarks.training.peers import LIGER, MAKERS, PEERS, TITAN, TRL, UNSLOTH, WAYS, titan_ways, unsloth_ways
from benchmarks.training.rounds import Measured, mixed_speed
from benchmarks.training.run import run_training
from benchmarks.training.table import ratios, table
from benchmarks.training.workload import Part, make_work, new_share, pairs_per_token, typical_parts
from truebatch.errors import ConfigError
from truebatch.hf.heads.heads import head_of
from truebatch.verification.census.processes import Ended

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SIZES = {"longest": 60, "cells": 200, "slots": 64}

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(scope="module", params=["qwen2-tiny", "bert-tiny"])
def prepared(request):
    shape = SHAPES[request.param]
    model = build_model(shape, longest=60, device="cpu", dtype=torch.float32)
    return model, make_work(head_of(model), shape, "chat", num=64, **SIZES)


def test_every_way_has_the_tokens_of_its_samples_and_runs_them(prepared):
    model, work = prepared
    torch.compiler.reset()
    for way in all_ways(model, work, device=torch.device("cpu"), backend="eager"):
        parts = way.parts()
        assert parts, way.name
        for part in parts[:2]:
            batch = part.make()
            ids = getattr(batch, "sample_ids", None)
            if ids is not None and "uniform" not in way.name:
                assert sorted(part.lengths.tolist()) == sorted(work.lengths[list(ids)].tolist()), way.name
            shape = batch[0].shape if isinstance(batch, tuple) else batch["input_ids"].shape
            assert part.tokens <= part.cells == shape.numel(), way.name
        model.zero_grad()
        with way.around():
            way.run(parts[0].make())
        assert all(p.grad is not None for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_ways_of_hugging_face_take_every_label_that_ours_takes(prepared):
    model, work = prepared
    batch = work.chunks(8, by_length=False)[0].make()
    ways = {way.name: way for way in all_ways(model, work, device=torch.device("cpu"), backend="eager")}
    found = []
    for name in ("HF default, 8", "ours padded"):
        model.zero_grad()
        ways[name].run(batch)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    cosine = torch.nn.functional.cosine_similarity(*found, dim=0)
    assert float(cosine) > 1 - 1e-5  # they are divided by different counts, and else the same


def test_a_packed_row_has_the_gradient_of_its_samples(prepared):
    model, work = prepared
    found = compare_gradients(model, work, torch.device("cpu"))
    assert found["gradient"] < 1e-5
    assert found["packed to fp32"] < 1e-5
    assert found["one by one to fp32"] == 0
    assert [far for _, far in found["farthest samples"]] == [0] * min(8, found["samples"])


def test_even_samples_cost_as_many_pairs_a_token_as_ragged_ones(prepared):
    _, work = prepared
    lengths = work.lengths.astype(float)
    assert abs(work.uniform_length - np.square(lengths).sum() / lengths.sum()) <= 4


def part_of(*lengths, cells=None):
    lengths = np.array(lengths)
    return Part(lengths=lengths, cells=cells or int(lengths.sum()), make=lambda: None)


def test_the_parts_that_are_timed_are_like_the_epoch():
    """Long samples lie at both ends; of all neighbours those count whose pairs, cells and number are of the mean."""
    long, short, mixed = part_of(8, 8), part_of(*[1] * 16), part_of(8, *[1] * 8)
    epoch = [long, long, long, mixed, mixed, mixed, mixed, short, short, short]
    for timed in typical_parts(epoch, 2):
        assert timed in ([mixed, mixed], [long, short], [short, long])
        assert pairs_per_token(timed) == pairs_per_token(epoch) == 72 / 16
    wide = [part_of(4, 4, cells=16), part_of(4, 4), part_of(4, 4, cells=12), part_of(4, 4, cells=12)]
    assert {part.cells for timed in typical_parts(wide, 1) for part in timed} == {12}
    assert typical_parts([long], 2) == ([long], [])
    timed, others = typical_parts([long, mixed, short], 2)
    assert {*timed, *others} == {long, mixed, short}
    assert others == [mixed]  # the two that are timed come first
    full, rest = part_of(4, 4, 4, 4), part_of(4, cells=16)
    for epoch in ([full, full, rest], [rest, full, full]):
        timed, _ = typical_parts(epoch, 1)
        assert timed == [full]  # the epoch's last row may be what is left for new shapes


def test_timed_rows_have_the_pairs_of_all_rows():
    shape = SHAPES["llama-tiny"]
    head = head_of(build_model(shape, longest=4096, device="cpu", dtype=torch.float32))
    for lengths, cells in (("chat", 16384), ("patient", 16384), ("bimodal", 16384), ("chat", 24576)):
        work = make_work(head, shape, lengths, num=4096, longest=4096, cells=cells, slots=2048)
        parts = work.packed(is_static=True)
        for timed in typical_parts(parts, 4):
            assert pairs_per_token(timed) == pytest.approx(work.pairs_per_token, rel=0.02)
        chunks = work.chunks(8, by_length=False)
        fill = work.tokens / sum(part.cells for part in chunks)
        for timed in typical_parts(chunks, 6):
            assert sum(p.tokens for p in timed) / sum(p.cells for p in timed) == pytest.approx(fill, rel=0.1)


def test_memory_is_that_of_the_epochs_widest_micro_batch(prepared):
    _, work = prepared
    assert sum(part.tokens for part in work.chunks(8, by_length=False)) == work.tokens  # all of it, not its beginning
    assert max(part.cells for part in work.chunks(1, by_length=False)) == int(work.lengths.max())


def test_one_case_is_measured_written_and_shown(tmp_path):
    config = TrainingBenchConfig(
        cells=120, longest=40, samples=40, step_tokens=500, way_seconds=0.0, thinned=8, backend="eager",
        cases=(Case("qwen2-tiny", "patient"),), seconds=1e9,
    )  # fmt: skip
    lines = []
    result = run_training(config, out=tmp_path / "t.json", say=lines.append)
    assert json.loads((tmp_path / "t.json").read_text())["ratios"] == result["ratios"]
    found = result["ratios"]["qwen2-tiny/patient"]
    assert found["ours packed / one by one"] > 0
    assert any("ours packed, compiled" in line for line in lines)
    assert all(row["compilations"] == 0 for row in result["rows"])  # nothing compiles after the warm-up


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "measure_peak", lambda _: pytest.fail("measured"))
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="file"):
        run_training(TrainingBenchConfig(), out=tmp_path / "file" / "t.json", say=lambda _: None)
    check_can_keep(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_threads_are_those_of_a_cpu():
    assert make_config(device="cpu").threads == 1
    assert make_config(device="cpu", threads=2).threads == 2
    with pytest.raises(ConfigError, match="one or more"):
        make_config(device="cpu", threads=0)


@pytest.mark.parametrize(("threads", "took"), [(1, 3.0), (2, 5.0)])
def test_one_thread_is_timed_in_cpu_seconds_and_several_by_the_clock(monkeypatch, threads, took):
    now = {"process_time": 10.0, "perf_counter": 20.0}
    for name in now:
        monkeypatch.setattr(timing.time, name, lambda name=name: now[name])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert timing.time_once(lambda: now.update(process_time=13.0, perf_counter=25.0), torch.device("cpu")) == took


SMALL = {
    "cells": 120, "longest": 40, "samples": 40, "step_tokens": 500, "way_seconds": 0.0, "thinned": 8,
    "backend": "eager", "seconds": 1e9,
}  # fmt: skip


@pytest.fixture
def fast_peak(monkeypatch):
    """The matrix rate of this machine is not measured."""
    monkeypatch.setattr(training, "measure_peak", lambda _: 0.1)


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger: it marks the instance, and transformers' own module for every model after."""
    from transformers.models.qwen2 import modeling_qwen2

    def apply(*, model):
        model.is_marked = True
        monkeypatch.setattr(modeling_qwen2, "is_marked", True, raising=False)

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["liger_kernel.transformers.monkey_patch"]._apply_liger_kernel_to_instance = apply
    return modeling_qwen2


def test_only_ligers_own_rows_see_its_kernels(liger, fast_peak, monkeypatch):
    seen = []
    time_rounds = rounds.time_rounds

    def watch(way, *args, **kwargs):
        seen.append((way.name, getattr(liger, "is_marked", False)))
        return time_rounds(way, *args, **kwargs)

    monkeypatch.setattr(rounds, "time_rounds", watch)
    cases = (Case("qwen2-tiny", "chat", True), Case("qwen2-tiny", "patient"))
    ways = ("one by one", "ours packed", *LIGER)
    run_training(TrainingBenchConfig(**SMALL, cases=cases, ways=ways), say=lambda _: None)
    assert {name for name, _ in seen} == set(ways)
    assert all(is_marked == name.startswith("Liger") for name, is_marked in seen)


def test_libraries_that_are_not_there_are_named(fast_peak, monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda module: None)
    config = TrainingBenchConfig(**SMALL, cases=(Case("qwen2-tiny", "chat", True),), ways=("uniform", TITAN, *UNSLOTH))
    result = run_training(config, say=lambda _: None)
    assert [row["way"] for row in result["rows"]] == ["uniform"]
    assert result["left_out"] == [
        f"{TITAN}: torchtitan is not installed", *(f"{name}: unsloth is not installed" for name in UNSLOTH)
    ]  # fmt: skip


def test_what_rewrites_transformers_is_measured_in_a_process_of_its_own(fast_peak, monkeypatch):
    """A stand-in for the process: what it is asked for, and that its rows and reasons come back."""
    asked = []

    def run_each(tasks, work, how):
        for config in tasks:
            asked.append(config.ways)
            row = dict.fromkeys(Measured.__dataclass_fields__, 1.0) | {"way": UNSLOTH[1], "case": "qwen2-tiny/chat"}
            found = {
                "rows": [row],
                "left_out": ["Unsloth, 8: no"],
                "work": {"qwen2-tiny/chat": {"seconds_of_ways": {UNSLOTH[1]: 3.0}}},
            }
            yield Ended(task=config, result=found, seconds=1.0)

    monkeypatch.setattr(training, "find_spec", lambda module: module)
    monkeypatch.setattr(training, "run_each", run_each)
    config = TrainingBenchConfig(**SMALL, cases=(Case("qwen2-tiny", "chat"),), ways=("uniform", *UNSLOTH))
    result = run_training(config, say=lambda _: None)
    assert asked == [UNSLOTH]
    assert [row["way"] for row in result["rows"]] == ["uniform", UNSLOTH[1]]
    assert result["left_out"] == ["Unsloth, 8: no"]
    assert set(result["work"]["qwen2-tiny/chat"]["seconds_of_ways"]) == {"uniform", UNSLOTH[1]}
    died = lambda tasks, work, how: [Ended(task=None, result=None, seconds=1.0, problem="died")]  # noqa: E731
    monkeypatch.setattr(training, "run_each", died)
    assert run_training(config, say=lambda _: None)["left_out"] == [f"{', '.join(UNSLOTH)}: died"]


def test_libraries_that_need_a_card_say_so(prepared):
    model, work = prepared
    with pytest.raises(ValueError, match="a GPU alone"):
        unsloth_ways(model, work, device=torch.device("cpu"), backend="eager")
    with pytest.raises(ValueError, match="kind llama"):
        titan_ways(model, work, device=torch.device("cuda"), backend="eager")


def test_named_ways_alone_are_measured(fast_peak):
    config = TrainingBenchConfig(**SMALL, cases=(Case("qwen2-tiny", "patient", True),), ways=("uniform", "ours padded"))
    result = run_training(config, say=lambda _: None)
    assert [row["way"] for row in result["rows"]] == ["ours padded", "uniform"]
    assert "equality" not in result
    assert set(result["work"]["qwen2-tiny/patient"]["seconds_of_ways"]) == {"ours padded", "uniform"}


def test_ways_are_named_with_commas_although_names_hold_some():
    named = "uniform, our kernel, compiled,ours packed, uniform, HF default, 8"
    assert make_config(device="cpu", ways=named).ways == (
        "HF default, 8", "ours packed", "uniform", "uniform, our kernel, compiled"
    )  # fmt: skip
    assert make_config(device="cpu").ways == ()
    with pytest.raises(ConfigError, match="no such way; did you mean 'ours packed'"):
        make_config(device="cpu", ways="uniform,our packed")


def test_a_way_runs_beside_its_limit_and_every_name_is_known(prepared):
    model, work = prepared
    names = [way.name for way in all_ways(model, work, device=torch.device("cpu"), backend="eager")]
    assert names == list(OWN)
    assert set(MAKERS) == set(PEERS.values())
    for order in (WAYS, EVERY_CASE):
        for way in ("ours packed", "ours packed, compiled"):
            assert order[order.index(way) + 1] == way.replace("ours packed", "uniform")


def test_an_encoder_has_no_ways_of_causal_models():
    config = TrainingBenchConfig(ways=("uniform", TRL, TITAN, *LIGER, *UNSLOTH))
    assert config.ways_of(Case("bert-tiny", "chat")) == ("uniform",)


def test_what_there_was_no_time_for_is_named(fast_peak):
    config = TrainingBenchConfig(cases=(Case("qwen2-tiny", "chat"),), seconds=-1.0)
    lines = []
    result = run_training(config, say=lines.append)
    assert result["left_out"] == ["qwen2-tiny/chat: out of time"]
    assert lines[-1] == "left out: qwen2-tiny/chat: out of time"


def test_ratios_are_of_what_they_say():
    speeds = {"one by one": 1.0, "HF default, 8": 5.0, "ours packed": 40.0, "uniform": 50.0}
    rows = [
        {"case": "a/b", "way": way, "tokens_per_second": speed, "peak_gib": 80.0 / speed, "share_of_peak": 0.5,
         "fill": 1.0, "compilations": 0, "updating_each": speed / 2, "new_shapes": speed, "first_epoch": speed**2}
        for way, speed in speeds.items()
    ]  # fmt: skip
    found = ratios(rows)
    assert found == {
        "a/b": {
            "ours packed / uniform": 0.8,
            "ours packed / HF default, 8": 8.0,
            "ours packed / one by one": 40.0,
            "new shapes: ours packed / HF default, 8": 8.0,
            "new shapes: ours packed / one by one": 40.0,
            "first epoch: ours packed / HF default, 8": 64.0,
            "first epoch: ours packed / one by one": 1600.0,
            "one update a micro-batch: ours packed / HF default, 8": 8.0,
            "one update a micro-batch: ours packed / one by one": 40.0,
            "memory, ours packed / HF default, 8": 0.125,
        }
    }
    assert table({"ratios": found, "rows": rows, "left_out": []})[2] == "     0.800  ours packed / uniform"


def test_a_first_epoch_meets_some_shapes_for_the_first_time():
    assert new_share([part_of(4, cells=8), part_of(5, cells=8), part_of(4), part_of(2, 2)]) == 0.5
    assert mixed_speed(100.0, 10.0, 0.0) == 100.0
    assert mixed_speed(100.0, 10.0, 1.0) == 10.0
    assert mixed_speed(100.0, 50.0, 0.5) == pytest.approx(2 / (1 / 100 + 1 / 50))


def test_the_first_epochs_of_the_lab_page_follow_from_the_kept_rows_of_the_card():
    """Rows that were kept before the benchmark computed them itself."""
    kept = json.loads((RESULTS / "training_cuda.json").read_text())
    shape, sizes = SHAPES["llama-tiny"], kept["config"]
    head = head_of(build_model(shape, longest=sizes["longest"], device="cpu", dtype=torch.float32))
    named: dict[str, list[str]] = {other: [] for other in ("HF default, 8", "HF group_by_length, 8", "one by one")}
    for case in sizes["cases"]:
        cells = case["cells"] or sizes["cells"]
        work = make_work(
            head, shape, case["lengths"], num=sizes["samples"], longest=sizes["longest"], cells=cells, slots=2048
        )
        parts = {
            "one by one": work.chunks(1, by_length=False), "HF default, 8": work.chunks(8, by_length=False),
            "HF group_by_length, 8": work.chunks(8, by_length=True),
            "ours packed, compiled": work.packed(is_static=True),
        }  # fmt: skip
        name = f"{case['shape']}/{case['lengths']}"
        rows = {row["way"]: row for row in kept["rows"] if row["case"] == name}
        speeds = {
            way: mixed_speed(rows[way]["tokens_per_second"], rows[way]["new_shapes"], new_share(epoch))
            for way, epoch in parts.items()
        }
        for other, found in named.items():
            found.append(f"{speeds['ours packed, compiled'] / speeds[other]:.1f}")
    lab = (RESULTS.parent / "lab.md").read_text()
    for other, found in named.items():
        assert f"| first epoch, computed: ours packed, compiled / {other} | {' | '.join(found)} |" in lab


def test_operations_are_counted_from_the_weights():
    shape = SHAPES["bert-tiny"]
    model = build_model(shape, longest=60, device="cpu", dtype=torch.float32)
    layer = 4 * 128 * 128 + 2 * 128 * 512
    assert matrix_flops_per_token(model) == 6 * (2 * layer + 128 * 128 + 128 * 1024)
    assert matrix_flops_per_token(model, labelled=0.25) == 6 * (2 * layer + 128 * 128 + 128 * 256)


@pytest.mark.parametrize(
    "wrong",
    [{"device": "tpu"}, {"device": "cpu", "only": "llama-9b/chat"}]
    + [{"device": "cpu", "seconds": wrong} for wrong in (float("nan"), -1.0, float("inf"))],
)
def test_unknown_devices_and_cases_are_refused(wrong):
    with pytest.raises(ConfigError):
        make_config(**wrong)


def test_rows_that_cannot_hold_the_longest_sample_are_refused():
    assert make_config(device="cpu", cells=4096).cells == 4096
    with pytest.raises(ConfigError, match="a row must hold the longest sample"):
        make_config(device="cpu", cells=100)


def test_no_way_of_a_group_begins_when_the_time_is_over(fast_peak, monkeypatch):
    begun, begin = [], rounds._Begun.__init__

    def slow(self, prepared, way, config):
        begin(self, prepared, way, config)
        begun.append(way.name)
        monkeypatch.setattr(training.time, "monotonic", lambda: 1e12)

    monkeypatch.setattr(rounds._Begun, "__init__", slow)
    config = TrainingBenchConfig(**SMALL, cases=(Case("qwen2-tiny", "chat"),), ways=("ours packed", "uniform"))
    result = run_training(config, say=lambda _: None)
    assert begun == ["ours packed"]
    assert [row["way"] for row in result["rows"]] == ["ours packed"]
    assert result["left_out"] == ["qwen2-tiny/chat: uniform: out of time"]
