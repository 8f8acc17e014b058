"""The harness: cases x methods in turns, a row after the other onto the disk, options, a run that goes on, exit codes."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

import pytest

from benchmarks.cli import BENCHMARKS, load_benchmark
from benchmarks.cli import run as run_benchmarks
from benchmarks.harness.benchmark import UNFINISHED, Benchmark, make_parser, option, run_benchmark
from benchmarks.pages.tables import missing_origin
from truebatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Options of every kind."""

    rounds: int = option(1, "How often.")
    sizes: tuple[int, ...] = option((1, 2), "Of the cases.")
    hidden: int = 7


@pytest.fixture
def counting():
    """A benchmark that says in which order it was asked, and can be stopped."""
    asked = []

    def make(stop_at=None, **given):
        def measure(case, method):
            if len(asked) == stop_at:
                raise KeyboardInterrupt
            asked.append((case, method))
            return {"seconds": 10 - len(asked)} if method != "none" else None

        return Benchmark(**{
            "name": "counting", "about": "Counts.", "options": Counted, "measure": measure,
            "cases": lambda options: [f"size {n}" for n in options.sizes], "methods": lambda options: ["a", "b"],
            "prepare": lambda options, case: case, "rounds": lambda options: options.rounds, "best_of": "seconds",
            "summary": lambda rows: {"ratios": {"rows": len(rows)}}, **given,
        })  # fmt: skip

    return asked, make


def names_of(file):
    return [(row["case"], row["method"]) for row in json.loads(file.read_text())["rows"]]


def test_methods_take_turns_and_the_best_round_is_kept(counting, tmp_path):
    asked, make = counting
    out = tmp_path / "new" / "a.json"
    assert run_benchmark(make(), ["--rounds", "2", "--sizes", "3", "--json", str(out)]) == 0
    assert asked == [("size 3", "a"), ("size 3", "b")] * 2
    kept = json.loads(out.read_text())
    assert [row["seconds"] for row in kept["rows"]] == [7, 6]
    assert next(iter(kept)) == "ratios"
    assert kept["config"] == {"rounds": 2, "sizes": [3], "hidden": 7}
    assert kept["command"] == f"python -m benchmarks counting --rounds 2 --sizes 3 --json {out}"
    assert missing_origin(kept) == []
    assert UNFINISHED not in kept


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(counting, tmp_path):
    asked, make = counting
    out = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(make(stop_at=3), ["--json", str(out)])
    assert json.loads(out.read_text())[UNFINISHED] is True
    assert len(names_of(out)) == 3
    assert run_benchmark(make(), ["--json", str(out)]) == 0
    assert asked == names_of(out) == [("size 1", "a"), ("size 1", "b"), ("size 2", "a"), ("size 2", "b")]
    assert run_benchmark(make(), ["--json", str(out)]) == 0
    assert len(asked) == 8  # a finished run is measured anew


def test_a_stopped_run_with_other_options_is_refused_until_it_is_to_be_fresh(counting, tmp_path):
    _, make = counting
    out = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(make(stop_at=1), ["--json", str(out)])
    with pytest.raises(ConfigError, match="another config"):
        run_benchmark(make(), ["--sizes", "5", "--json", str(out)])
    assert run_benchmark(make(), ["--sizes", "5", "--fresh", "--json", str(out)]) == 0
    assert names_of(out) == [("size 5", "a"), ("size 5", "b")]
    assert "--fresh" not in json.loads(out.read_text())["command"]


def test_cases_and_methods_are_chosen_by_name_and_others_are_refused(counting):
    asked, make = counting
    assert run_benchmark(make(), ["--only", "size 2", "--methods", "b"]) == 0
    assert asked == [("size 2", "b")]
    with pytest.raises(ConfigError, match="no such case"):
        run_benchmark(make(), ["--only", "size 9"])
    with pytest.raises(ConfigError, match="no such method"):
        run_benchmark(make(), ["--methods", "c"])


def test_a_method_that_is_not_for_a_case_leaves_no_row(counting, tmp_path):
    _, make = counting
    out = tmp_path / "a.json"
    assert run_benchmark(make(methods=lambda options: ["none", "a"]), ["--sizes", "1", "--json", str(out)]) == 0
    assert names_of(out) == [("size 1", "a")]


def test_a_limit_that_is_missed_is_named_kept_and_the_exit_code(counting, tmp_path, capsys):
    _, make = counting
    out = tmp_path / "a.json"
    assert run_benchmark(make(problems=lambda result: ["too slow"]), ["--json", str(out)]) == 1
    assert json.loads(out.read_text())["problems"] == ["too slow"]
    assert "missed: too slow" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_named_as_it_is_typed_and_has_cases_and_methods(name):
    benchmark = load_benchmark(name)
    options = benchmark.options()
    assert benchmark.name == name
    for named in (benchmark.cases(options), benchmark.methods(options)):
        assert named
        assert len(named) == len(set(named))
    assert "--json" in make_parser(benchmark).format_help()


def test_the_list_has_a_line_for_each_and_each_says_its_own_options(capsys):
    assert run_benchmarks(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in BENCHMARKS)
    assert run_benchmarks(["attention", "--help"]) == 0
    assert "--kv-heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("attention --cells 128 --segments 4 --heads 2 --kv-heads 2 --head-size 8 --repeats 1", 2),
        ("verify --only 'gpt2 causal_lm'", 2),
        ("estimate --only 'llama-tiny, packed' --methods '1 sample'", 1),
        ("trainer_accumulation --only 'causal LM (llama), accumulation 4'", 3),
        ("vl_reward_editing --pairs 3 --seconds 0.001 --only '2 workers'", 1),
        pytest.param("scoring_cost --samples 20", 2, marks=pytest.mark.slow),  # processes that import everything
    ],
)
def test_small_runs_of_every_benchmark(line, rows, tmp_path):
    out = tmp_path / "a.json"
    assert run_benchmarks([*shlex.split(line), "--json", str(out)]) in (0, 1)  # 1: so small, no gain
    kept = json.loads(out.read_text())
    assert len(kept["rows"]) == rows
    assert missing_origin(kept) == []
