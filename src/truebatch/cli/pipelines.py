"""Scoring pipelines of several stages that systems bring: what `truebatch score NAME` and `truebatch run` do with
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from truebatch.plugins import load_plugin, pipelines


class ExportRows(Protocol):
    """Write the rows of a run to a file."""

    def __call__(self, run: Path, to: Path, *, for_spreadsheet: bool) -> int:
        """Give how many rows were written."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringPipeline:
    """Stages that are scoring runs of their own, in one folder."""

    score: Callable[[Path | None, list[str] | None], int]
    """Run all stages with a settings file and overrides; gives the exit code."""
    is_run: Callable[[Path], bool]
    """True if a folder is a run of this pipeline."""
    stage_folders: Callable[[Path], list[Path]]
    """The scoring runs inside of a run that have begun, in order."""
    export: ExportRows
    """Write a row for every sample of a run to a file; gives how many."""
    retry: Callable[[Path, list[str], Path | None, list[str] | None], int]
    """Run the failures of some kinds again, with the settings that the user states; gives the exit code."""


def pipeline_named(name: str) -> ScoringPipeline | None:
    """The pipeline of this name, if there is one."""
    target = pipelines().get(name)
    found: ScoringPipeline | None = None if target is None else load_plugin(target)
    return found


def is_pipeline_run(run: Path) -> bool:
    """True if a folder is a run of a pipeline; a plain scoring run is not."""
    return _pipeline_of(run) is not None


def stage_folders(run: Path) -> list[Path]:
    """The scoring runs inside of a pipeline's run that have begun, in order."""
    return _owner(run).stage_folders(run)


def export_pipeline(run: Path, to: Path, *, for_spreadsheet: bool = False) -> int:
    """Write a row for every sample of a pipeline's run to a file; gives how many."""
    return _owner(run).export(run, to, for_spreadsheet=for_spreadsheet)


def retry_pipeline(run: Path, kinds: list[str], config: Path | None, set_: list[str] | None) -> int:
    """Run the failures of some kinds again, with the settings that the user states; gives the exit code."""
    return _owner(run).retry(run, kinds, config, set_)


def _pipeline_of(run: Path) -> ScoringPipeline | None:
    every: list[ScoringPipeline] = [load_plugin(target) for target in pipelines().values()]
    return next((one for one in every if one.is_run(run)), None)


def _owner(run: Path) -> ScoringPipeline:
    found = _pipeline_of(run)
    assert found is not None  # callers have checked `is_pipeline_run`
    return found
