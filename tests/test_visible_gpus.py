"""Which GPU each process gets, told by tables: no GPU is needed for it."""

from __future__ import annotations

import pytest

from truebatch.errors import ConfigError
from truebatch.scoring import spec
from truebatch.scoring.spec import ScoreCall, open_backends
from truebatch.training.distributed.device import usable_gpus
from truebatch.visible_gpus import VISIBLE, check_processes, gpu_environments, visible_gpus
from truebatch_systems.vl_reward.judge import judges

UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-8932f938"
MIGS = "MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0,MIG-5c2f"


@pytest.mark.parametrize(
    ("mask", "found", "names"),
    [
        (None, 0, []),
        (None, 3, ["0", "1", "2"]),
        ("4,5", 2, ["4", "5"]),
        (" 5 , 4 ", 2, ["5", "4"]),
        ("0,1,2,3", 2, ["0", "1"]),
        (UUIDS, 2, UUIDS.split(",")),
        (MIGS, 1, MIGS.split(",")),
        (MIGS, 0, []),
        ("", 0, []),
        ("-1", 0, []),
        ("NoDevFiles", 0, []),
        ("3,-1,2", 1, ["3"]),
        ("3,,2", 1, ["3"]),
        ("3,nonsense,2", 1, ["3"]),
    ],
)
def test_gpus_are_called_as_the_mask_calls_them(mask, found, names):
    assert visible_gpus({} if mask is None else {VISIBLE: mask}, found) == names


@pytest.mark.parametrize(
    ("mask", "found", "numbers", "given"),
    [
        (None, 2, [0, 1], ["0", "1"]),
        ("4,5", 2, [0, 1], ["4", "5"]),
        ("4,5", 2, [1], ["5"]),
        ("7,3,6", 3, [2, 0], ["6", "7"]),
        (UUIDS, 2, [0, 1], UUIDS.split(",")),
        (MIGS, 1, [0, 1, 2], MIGS.split(",")),
        ("-1", 0, [], []),
    ],
)
def test_every_process_gets_the_gpu_that_is_meant(mask, found, numbers, given):
    around = {"HOME": "/root"} | ({} if mask is None else {VISIBLE: mask})
    environments = gpu_environments(around, numbers, found, asked="--workers")
    assert environments == [{VISIBLE: name} for name in given]


@pytest.mark.parametrize(
    ("mask", "found", "numbers"),
    [
        (None, 2, [0, 1, 2]),
        (None, 0, [0]),
        ("4,5", 2, [4]),
        ("4,5", 2, [0, 1, 2]),
        ("", 0, [0]),
        ("-1", 0, [0]),
        ("NoDevFiles", 0, [0]),
        (UUIDS, 2, [2]),
        (MIGS, 1, [3]),
        (None, 2, [-1]),
    ],
)
def test_more_processes_than_gpus_are_refused(mask, found, numbers):
    around = {} if mask is None else {VISIBLE: mask}
    with pytest.raises(ConfigError, match="fewer GPUs than processes") as refused:
        gpu_environments(around, numbers, found, asked="--workers 3")
    assert "--workers 3" in refused.value.seen
    assert (f"{VISIBLE}={mask}" in refused.value.seen) == (mask is not None)


@pytest.mark.parametrize(("processes", "gpus", "cores"), [(2, 2, 1), (1, 8, 1), (2, 0, 2), (8, 0, 2), (1, 0, 1)])
def test_processes_that_have_room_may_start(processes, gpus, cores):
    check_processes(processes, gpus=gpus, cores=cores, asked="--devices")


@pytest.mark.parametrize(
    ("processes", "gpus", "cores", "word"),
    [(3, 2, 64, "fewer GPUs"), (2, 1, 64, "fewer GPUs"), (99, 0, 2, "no GPU"), (9, 0, 2, "at most 8")],
)
def test_processes_without_room_are_refused(processes, gpus, cores, word):
    with pytest.raises(ConfigError, match=word):
        check_processes(processes, gpus=gpus, cores=cores, asked="--devices")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def places_of(backends) -> list[dict[str, str]]:
    return [dict(one.transport._settings.environment) for one in backends]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_judges_get_the_gpus_of_the_mask(two_gpus, device):
    call = ScoreCall(model="folder", workers=2, device=device)
    assert places_of(open_backends(call)) == [{VISIBLE: "4"}, {VISIBLE: "5"}]
    with pytest.raises(ConfigError, match="fewer GPUs"):
        open_backends(ScoreCall(model="folder", workers=3, device=device))


@pytest.mark.parametrize("call", [{"model": "scripted"}, {"model": "folder", "device": "cpu"}])
def test_judges_that_need_no_gpu_may_be_many(two_gpus, call):
    assert places_of(open_backends(ScoreCall(workers=3, **call))) == [{}, {}, {}]


def test_without_a_gpu_judges_run_on_the_cpu_unless_a_gpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(spec.torch.cuda, "device_count", lambda: 0)
    assert places_of(open_backends(ScoreCall(model="folder", workers=2))) == [{}, {}]
    with pytest.raises(ConfigError, match="fewer GPUs"):
        open_backends(ScoreCall(model="folder", workers=2, device="cuda"))


def test_device_ids_are_counted_among_the_visible_ones(two_gpus):
    assert judges.gpu_places([1, 0]) == [{VISIBLE: "5"}, {VISIBLE: "4"}]
    with pytest.raises(ConfigError, match="fewer GPUs"):
        judges.check_gpus([4])


@pytest.mark.parametrize(("told", "number"), [("", 2), ("false", 2), ("true", 0), ("1", 0)])
def test_accelerate_may_be_told_to_leave_the_gpus_alone(two_gpus, monkeypatch, told, number):
    monkeypatch.setenv("ACCELERATE_USE_CPU", told)
    assert usable_gpus() == number
