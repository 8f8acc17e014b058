"""Which GPU each process of a command gets, out of those that this process may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truebatch.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_PER_CORE = 4
"""Processes on one core: enough to try out what several devices will do."""
_MIG = "MIG-"
"""A part of a GPU: CUDA shows a process one of them at most, so that several can only be counted by their names."""


def check_processes(processes: int, *, gpus: int, cores: int, asked: str) -> None:
    """Refuse more processes of one run on this machine than its GPUs, or without one than its cores can serve at all."""
    if gpus and processes > gpus:
        raise ConfigError(
            "there are fewer GPUs than processes that need one",
            seen=f"{asked}; {gpus} GPU(s) can be used here",
            do=f"ask for at most {gpus}, or train on the CPU: ACCELERATE_USE_CPU=true",
        )
    most = MOST_PER_CORE * cores
    if not gpus and processes > most:
        raise ConfigError(
            "there is no GPU, and so many processes only get in each other's way on its cores",
            seen=f"{asked}; {cores} core(s)",
            do=f"ask for at most {most}; one process uses all cores",
        )


def visible_gpus(environment: Mapping[str, str], found: int) -> list[str]:
    """The names under which another process can be given one of the GPUs that torch finds in this one.

    They are what the inherited mask calls them (numbers, GPU-... or MIG-...), else numbers; what follows a -1 or
    an empty name is hidden, as CUDA reads it.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5"}, 2)
    ['4', '5']
    """
    mask = environment.get(VISIBLE)
    if mask is None:
        return [str(number) for number in range(found)]
    names: list[str] = []
    for name in (part.strip() for part in mask.split(",")):
        if not (name.isdigit() or name.startswith(("GPU-", _MIG))):
            break
        names.append(name)
    return names if found and names and names[0].startswith(_MIG) else names[:found]


def gpu_environments(
    environment: Mapping[str, str], numbers: Sequence[int], found: int, *, asked: str
) -> list[dict[str, str]]:
    """What to set for each process so that the n-th GPU that is visible here is its only one.

    `numbers` says which each of them gets, `asked` how the user asked for it. Numbers that are not there are refused: such
    a process would see no GPU and go on, very slowly, on the CPU.
    """
    names = visible_gpus(environment, found)
    if any(not 0 <= number < len(names) for number in numbers):
        mask = environment.get(VISIBLE)
        masked = "" if mask is None else f", {VISIBLE}={mask}"
        raise ConfigError(
            "there are fewer GPUs than processes that need one",
            seen=f"{asked}; {len(names)} GPU(s) can be used here{masked}",
            do=f"ask for those that are there, give more of them in {VISIBLE}, or run on the CPU: device=cpu",
        )
    return [{VISIBLE: names[number]} for number in numbers]
