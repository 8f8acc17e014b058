"""Two processes give what one gives: the same gradient, the same run, and a run goes on with another number of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import TEXT_FIELDS
from tests.training import processes
from truebatch.training.memory.oom_retry import OomGuard

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Everything two ranks do, done once: importing torch takes longer than all of it."""
    folder = tmp_path_factory.mktemp("two")
    processes.run(folder / "parts", 2)  # one process begins the run that two then continue
    processes.run_bits(folder / "bits parts", 3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.processes", str(folder)],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    return folder, json.loads((folder / "results.json").read_text())


def test_two_processes_have_the_bits_of_one(two, tmp_path):
    steps, best = processes.run_bits(tmp_path, 6)
    assert two[1]["bits"] == [[list(one) for one in steps], best]


def test_two_processes_go_on_with_the_bits_of_one_that_was_stopped(two, tmp_path):
    steps, best = processes.run_bits(tmp_path, 6)
    assert two[1]["bits, second part"] == [[list(one) for one in steps[3:]], best]


def relative(a, b):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return float((a - b).norm() / b.norm())


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="all tests run in one process")
def test_tests_of_one_group_run_in_one_process(request):
    """Otherwise every fixture that starts processes does so twice, and all tests take a minute longer."""
    assert request.node.nodeid.endswith("@processes")


@pytest.mark.parametrize("case", ["text", "sets"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_two_processes_take_the_gradient_of_one(two, case, layout):
    expected = processes.gradients(case, "padded")
    got = two[1][f"{case} {layout}"]
    assert len(got) == len(expected)
    for (loss, counts, gradient), (want_loss, want_counts, want) in zip(got, expected, strict=True):
        assert counts == want_counts
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert relative(gradient, want) <= 1e-6


@pytest.mark.parametrize("cells", [20, 40])
@pytest.mark.parametrize(("name", "layout"), [(n, x) for n, (_, layouts) in processes.HEADS.items() for x in layouts])
def test_every_head_has_one_gradient_on_one_process_and_on_two(two, name, layout, cells):
    whole = processes.head_gradients(name, "padded", 1000)
    assert relative(processes.head_gradients(name, layout, cells), whole) <= 1e-6
    assert relative(two[1][f"{name} {layout} {cells}"], whole) <= 1e-6


@pytest.mark.parametrize("policy", processes.POLICIES)
@pytest.mark.parametrize("source", processes.SOURCES)
def test_nan_on_any_rank_is_met_by_all_ranks_alike(two, source, policy):
    first, second = two[1][f"bad {source} {policy}"]
    assert first == second  # the same decision, and the same parameters as far as finite goes
    assert first["saved"]
    if source != "optimiser":
        assert first["finite"]
        assert first["ended"] == ("raised" if policy == "raise" else "done")


def test_sharded_parameters_get_the_same_gradient(two):
    for (loss, _, gradient), (want_loss, _, want) in zip(
        two[1]["sharded"], processes.gradients("text", "padded"), strict=True
    ):
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert relative(gradient, want) <= 1e-6


def same(got, expected):
    assert len(got) == len(expected)
    for (loss, counts, gradient), (want_loss, want_counts, want) in zip(got, expected, strict=True):
        assert counts == want_counts
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert relative(gradient, want) <= 1e-6


@pytest.mark.parametrize("at", [0, 1])
def test_memory_that_runs_out_on_one_rank_keeps_nobody_waiting_and_changes_nothing(two, at):
    same(two[1][f"out of memory on rank {at}"], processes.gradients("text", "padded"))
    assert two[1][f"recoveries {at}"] == [int(at == r) for r in range(2)]


def test_ranks_split_each_as_it_must(two):
    same(two[1]["limited"], processes.gradients("text", "padded"))


def test_a_sample_left_out_on_one_rank_is_left_out_of_the_counts_of_all(two):
    """Samples of 31 and 29 tokens do not fit; the reference is one process that has the same memory."""
    guard = OomGuard(fields=TEXT_FIELDS, when_too_large="quarantine")
    expected = processes.gradients("text", "padded", guard=guard, limit=28)
    same(two[1]["quarantine"], expected)
    assert two[1]["quarantined"] == [[1, 5], [1, 5]]
    lengths = [len(sample["input_ids"]) for sample in processes.TEXTS]
    assert sum(counts["nll"] for _, counts, _ in expected) == sum(n - 1 for n in lengths if n <= 28)


def test_sharded_ranks_that_ran_out_of_memory_go_on_with_a_lower_budget(two):
    said, cells, found = two[1]["sharded, out of memory"]
    assert said.startswith("75 ")
    assert cells is not None
    same(found, processes.gradients("text", "padded"))


def test_a_run_goes_on_with_another_number_of_processes(two, tmp_path):
    """One process, then two, then one: the weights of a run in one process."""
    folder, results = two
    alone = processes.run(tmp_path / "alone", 6)
    assert relative(results["whole"]["weights"], alone["weights"]) <= 1e-6
    assert results["second part"]["step"] == 4
    last = processes.run(folder / "parts", 6)
    assert last["step"] == 6
    assert relative(last["weights"], alone["weights"]) <= 1e-6


def test_a_signal_to_one_rank_stops_all_and_is_resumable(two, tmp_path):
    folder, results = two
    assert results["stopped"]["exit_code"] == 75
    assert results["stopped"]["step"] < 6
    assert json.loads((folder / "stopped" / "status.json").read_text())["exit_code"] == 75
    last = processes.run(folder / "stopped", 6)
    assert relative(last["weights"], processes.run(tmp_path / "alone", 6)["weights"]) <= 1e-6


def test_two_processes_take_the_steps_of_a_stream_that_one_takes(two, tmp_path):
    assert relative(two[1]["stream"], processes.run_stream(tmp_path / "one")) <= 1e-6


def test_a_stream_that_gives_every_process_other_samples_is_refused(two):
    assert "every process other samples" in two[1]["dealt stream"]
