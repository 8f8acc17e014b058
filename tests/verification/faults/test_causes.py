"""Of many planted faults every one is found; most get the cause a person needs, and hardly any a misleading one."""

from collections import Counter

import pytest

from tests.verification.faults import mixing, norms, odd, rows, steps  # noqa: F401  (they register their faults)
from tests.verification.faults.fault import FAULTS, ask, judged

QUICK = (
    "attention ignores the mask", "mask in the first layer only", "a convolution reads padding", "GRU over packed rows",
    "a running sum over the row", "token shift by roll", "GroupNorm over time", "pooling: last token by -1",
    "positions counted from the end of the row", "divided by the width", "row 0's slice used for all",
    "ranks over the micro-batch", "in-batch negatives", "a clip in a gradient hook", "state kept between calls",
    "functional dropout in eval", "a mask kept for every shape", "results in the order of length", "NaN in backward alone",
    "a mean over a packed row", "targets broadcast against predictions", "edges without the start of their graph",
    "padding mask the wrong way round",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_gets_the_cause_a_person_needs(name):
    report = ask(FAULTS[name])
    assert judged(FAULTS[name], report) == "right", str(report)


@pytest.mark.slow
def test_of_all_planted_faults_none_is_missed_and_hardly_one_gets_a_misleading_cause():
    found = {name: judged(fault, ask(fault)) for name, fault in FAULTS.items()}
    tally = Counter(found.values())
    wrong = {name: verdict for name, verdict in found.items() if verdict != "right"}
    assert len(found) >= 125
    assert not tally["missed"], wrong
    assert tally["right"] >= 0.97 * len(found), wrong
    assert tally["misleading"] + tally["nothing said"] <= 0.02 * len(found), wrong
