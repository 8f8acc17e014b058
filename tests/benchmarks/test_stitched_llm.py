"""The benchmark of the note's settings, tiny: every way runs, ratios come first, budgets follow the memory line."""

import json
import time

import numpy as np
import torch

from benchmarks.systems.stitched_llm import Bench, Row, _at_memory, largest_budget, run_stitched
from benchmarks.systems.stitched_llm_workload import (
    StitchedBenchConfig,
    build_stitched,
    draw_lengths,
    make_samples,
    padded_shares,
)

TINY = StitchedBenchConfig(
    longest=64,
    median=9.0,
    samples=64,
    budgets=(128, 256),
    way_seconds=0.0,
    rounds_at_most=2,
    seconds=1e9,
    card_gib=0.005,
)


def row(cells, peak):
    return Row(way="", tokens_per_second=100.0, peak_gib=peak, fill=1.0, cells=cells, samples_per_step=4)


def test_every_way_is_measured_and_ratios_come_first(tmp_path):
    lines = []
    result = run_stitched(TINY, out=tmp_path / "rows.json", say=lines.append)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert next(iter(written)) == "ratios"
    assert [line for line in result["left_out"] if "torchao" not in line] == []
    assert {"packed at the fitted budget / the note", "8 rows of 64 tokens / 1 row"} <= set(written["ratios"])
    assert written["rows"][0]["way"].startswith("the note: batch 1, accumulation 4, padded to 64")
    assert written["rows"][0]["fill"] < 0.5
    steps = {row["way"].partition(":")[0]: (row["samples_per_step"], row["cells"]) for row in written["rows"][:3]}
    assert steps == {"the note": (4, 64), "as found": (1, 64), "wished for": (8, 128)}
    assert all(r["fill"] > 0.9 for r in written["rows"] if r["way"].startswith("packed,"))
    assert all(0 <= share < 0.5 for share in written["work"]["padded_shares"].values())
    stored = written["stored"]
    assert stored["bf16"]["weights_gib"] < 0.6 * stored["fp32"]["weights_gib"]
    assert abs(stored["bf16"]["loss"] / stored["fp32"]["loss"] - 1) < 0.01
    assert written["command"].startswith("python -m benchmarks.systems.stitched_llm")


def test_padding_by_token_budget_is_rare_on_the_lengths_of_the_card():
    config = StitchedBenchConfig()
    shares = padded_shares(draw_lengths(config, np.random.default_rng(0)), config.longest)
    # In the forward pass of the note, one row of 2048 cells, and in two of them where a step has enough to sort.
    assert max(share for cut, share in shares.items() if cut != "4096 cells, 256 samples a step") <= 0.15
    assert len(shares) == 4


def test_what_time_does_not_allow_is_named():
    result = run_stitched(StitchedBenchConfig(samples=64, budgets=(128,), seconds=-1.0), out=None, say=lambda _: None)
    assert result["rows"] == []
    assert all("out of time" in line for line in result["left_out"])


def test_the_largest_budget_lies_on_the_line_under_the_limit():
    rows = [row(1024, 2.0), row(2048, 3.0)]
    assert largest_budget(rows, 11.0) == int(1024 + (0.97 * 11 - 2) * 1024) // 512 * 512
    assert largest_budget(rows, 0.1) == 0
    # The line bends: the two rows next to the limit count.
    assert largest_budget([row(512, 1.0), *rows, row(4096, 9.0)], 8.0) == int(2048 + (7.76 - 3) / 6 * 2048) // 512 * 512
    assert largest_budget(rows[:1], 10.0) == 0


def test_budgets_of_a_memory_limit_are_measured_with_and_without_checkpointing():
    model = build_stitched(TINY)
    result = {"ratios": {}, "rows": [], "left_out": []}
    bench = Bench(
        model,
        make_samples(model, TINY),
        TINY,
        torch.device("cpu"),
        result,
        time.monotonic(),
        lambda: None,
        lambda _: None,
    )
    _at_memory(bench, row(64, 0.004), [row(128, 0.001), row(256, 0.0015)])
    assert {"packed in the note's own memory: cells", "packed in 0.005 GiB: cells"} <= set(result["ratios"])
    assert result["left_out"] == []
