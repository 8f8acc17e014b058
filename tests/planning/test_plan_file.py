"""A plan file is whole or refused; what is read back is what was written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.planning.reference import length_lists, patches_for, plan_configs, same_step
from truebatch.errors import DataError, TruebatchError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.plan_file import load_plan, save_plan
from truebatch.testing.length_distributions import example_lengths

with_folder = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=False
)


def sample_plan(**more: Any) -> Plan:
    lengths = example_lengths("chat", 300)
    config = PlanConfig(layout="packed", cells=8192, rows_per_step=3, costs={"patches": 40})
    return build_plan(lengths, config, ranks=2, costs={"patches": lengths % 7}, counts={"tokens": lengths}, **more)


@given(lengths=length_lists(), config=plan_configs(), ranks=st.integers(1, 5), others=st.integers(1, 5))
@with_folder
def test_a_plan_survives_its_file(
    tmp_path: Path, lengths: np.ndarray, config: PlanConfig, ranks: int, others: int
) -> None:
    plan = build_plan(lengths, config, ranks=ranks, epoch=3, costs=patches_for(lengths, config), counts={"n": lengths})
    save_plan(plan, tmp_path / "plan")
    read = load_plan(tmp_path / "plan")
    assert (read.config, read.epoch, read.ranks, read.num_steps) == (config, 3, ranks, plan.num_steps)
    assert read.fingerprint == plan.fingerprint
    assert read.statistics == plan.statistics
    for s in range(plan.num_steps):
        assert same_step(read.step(s), plan.step(s))
        assert same_step(read.step(s, ranks=others), plan.step(s, ranks=others))
        assert read.step_counts(s) == plan.step_counts(s)
    read.check_lengths(lengths)


def test_the_fingerprint_of_a_file_is_that_of_its_lengths(tmp_path: Path) -> None:
    save_plan(sample_plan(), tmp_path / "plan")
    read = load_plan(tmp_path / "plan")
    kept = read.fingerprint
    del read.__dict__["fingerprint"]
    assert read.fingerprint == kept


def test_cut_and_dropped_samples_survive_the_file(tmp_path: Path) -> None:
    lengths = [5, 90, 7]
    for overlong in ("cut", "drop"):
        save_plan(build_plan(lengths, PlanConfig(cells=50, overlong=overlong)), tmp_path / "plan")
        read = load_plan(tmp_path / "plan")
        read.check_lengths(lengths)
        assert read.statistics.overlong == 1
        assert (read.statistics.cut, read.statistics.dropped) == ((1, 0) if overlong == "cut" else (0, 1))


def test_every_rank_writes_the_same_bytes(tmp_path: Path) -> None:
    save_plan(sample_plan(), tmp_path / "a")
    save_plan(sample_plan(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # no drafts left


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    plan = sample_plan()
    save_plan(plan, tmp_path / "plan.safetensors")
    arrays = load_file(tmp_path / "plan.safetensors")
    assert arrays["order"].tolist() == plan.cut.order.tolist()
    assert arrays["cost.patches"].tolist() == plan.samples.costs["patches"].tolist()


def test_opening_a_plan_reads_no_samples(tmp_path: Path) -> None:
    save_plan(sample_plan(), tmp_path / "plan")
    read = load_plan(tmp_path / "plan", check=False)
    assert isinstance(read.cut.order, np.memmap)
    assert isinstance(read.samples.lengths, np.memmap)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    save_plan(sample_plan(), file)
    whole = file.read_bytes()
    for size in [0, 4, 8, 9, 100, len(whole) // 2, len(whole) - 4, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match="damaged or truncated") as caught:
            load_plan(file)
        assert str(file) in caught.value.seen


@given(place=st.integers(0), value=st.integers(1, 255))
@with_folder
def test_a_changed_byte_is_noticed_or_harmless(tmp_path: Path, place: int, value: int) -> None:
    """Nothing but a TruebatchError leaves; a change that is accepted lies in what no array or setting depends on."""
    plan, file = sample_plan(), tmp_path / "plan"
    save_plan(plan, file)
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= value
    file.write_bytes(data)
    try:
        read = load_plan(file)
    except TruebatchError:
        return
    assert read.cut.order.tolist() == plan.cut.order.tolist()
    assert read.samples.lengths.tolist() == plan.samples.lengths.tolist()
    assert (read.config, read.epoch, read.ranks) == (plan.config, plan.epoch, plan.ranks)
    assert read.fingerprint == plan.fingerprint


@given(data=st.binary(max_size=200))
@with_folder
def test_any_bytes_are_refused_in_three_parts(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plan").write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(DataError):
        load_plan(tmp_path / "plan")


def rewrite(file: Path, change: Any) -> None:
    """Change the header of a plan file and leave its arrays."""
    data = file.read_bytes()
    num = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + num])
    about = json.loads(header["__metadata__"]["truebatch"])
    del about["check"]
    change(header, about)
    about["check"] = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    header["__metadata__"]["truebatch"] = json.dumps(about)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + num :])


@pytest.mark.parametrize(("change", "wrong"), [
    (lambda header, about: about.update(version=99), "newer version"),
    (lambda header, about: about.update(format="other"), "not a plan"),
    (lambda header, about: about.update(ranks=0), "damaged"),
    (lambda header, about: about.update(epoch="0"), "damaged"),
    (lambda header, about: about["config"].update(celsl=3), "damaged"),
    (lambda header, about: about["config"].update(cells=-3), "damaged"),
    (lambda header, about: header.pop("order"), "damaged"),
    (lambda header, about: header["order"].update(dtype="F32"), "damaged"),
    (lambda header, about: header["order"].update(shape=[10**9]), "damaged"),
    (lambda header, about: header["order"].update(data_offsets=[0, 2**60], shape=[2**58]), "damaged"),
    (lambda header, about: header["order"].update(data_offsets=[-4, 0]), "damaged"),
    (lambda header, about: header["step_starts"].update(header["micro_starts"]), "damaged"),
])  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, change: Any, wrong: str) -> None:
    save_plan(sample_plan(), tmp_path / "plan")
    rewrite(tmp_path / "plan", change)
    with pytest.raises(DataError, match=wrong):
        load_plan(tmp_path / "plan", check=False)


def test_a_foreign_file_is_not_a_plan(tmp_path: Path) -> None:
    save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="not a plan"):
        load_plan(tmp_path / "model.safetensors")


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        load_plan(tmp_path / "nothing")
    with pytest.raises(DataError, match="could not be written"):
        save_plan(sample_plan(), tmp_path / "no" / "folder" / "plan")


def test_a_damaged_order_is_noticed_when_a_step_is_read(tmp_path: Path) -> None:
    file, plan = tmp_path / "plan", sample_plan()
    save_plan(plan, file)
    data = bytearray(file.read_bytes())
    first = data.index(plan.cut.order.astype("<i4").tobytes())
    data[first : first + 4] = (10**6).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        load_plan(file)
    with pytest.raises(DataError, match="a sample that does not exist"):
        load_plan(file, check=False).step(0)
