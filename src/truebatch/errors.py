"""Every error the library raises on purpose.

TruebatchError                           three parts: what is wrong, what was seen, what to do
  what was given (also ValueError)
    ConfigError                          a setting, a key or a target is not usable
    DataError                            a file or a sample cannot be read or is not what it was
    PlanError                            the samples cannot be planned under the given limits
    BatchError                           the samples of one micro-batch do not fit together
    AttentionError                       a mask or a segment table that attention would misread
  what happened (also RuntimeError)
    LoaderError                          a worker raised, died or hung while loading a named sample
    LawError                             a sample's result depends on what else is in its micro-batch
    RunError                             a run folder is owned by another process, or was made with other settings
    CheckpointError                      a checkpoint cannot be written, or cannot be trusted
  NonFiniteError (FloatingPointError)    a step is NaN or infinite; the model was not updated
  MemoryLimitError (MemoryError)         a sample or an update does not fit into memory, however a step is cut
  RestartError                           the run stopped and resumes when it is started again

`str(error)` is English in every language: it goes into logs, journals and `status.json`. A command translates the parts
where it shows them.
"""

from __future__ import annotations

from truebatch.language.console import three_parts


class TruebatchError(Exception):
    """Base class: `except TruebatchError` catches what the library raises on purpose.

    >>> from truebatch import PlanConfig, TruebatchError, build_plan
    >>> try:
    ...     build_plan([3, 900], PlanConfig(cells=600))
    ... except TruebatchError as error:
    ...     print(error.wrong)
    1 of 2 samples exceed a limit by themselves
    """

    def __init__(self, wrong: str, *, seen: str, do: str) -> None:
        super().__init__(wrong, seen, do)
        self.wrong = wrong
        self.seen = seen
        self.do = do

    def __str__(self) -> str:
        return three_parts(self.wrong, self.seen, self.do)

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes hand errors to the parent by pickling; keyword-only parts would be lost otherwise.
        return _rebuild, (type(self), self.wrong, self.seen, self.do)


def _rebuild(kind: type[TruebatchError], wrong: str, seen: str, do: str) -> TruebatchError:
    return kind(wrong, seen=seen, do=do)


class ConfigError(TruebatchError, ValueError):
    """A setting, a key or a target is not usable."""


class DataError(TruebatchError, ValueError):
    """A file or a sample cannot be read, or is not what it was when it was measured."""


class PlanError(TruebatchError, ValueError):
    """The samples cannot be planned under the given limits."""


class BatchError(TruebatchError, ValueError):
    """The samples of one micro-batch do not fit together."""


class AttentionError(TruebatchError, ValueError):
    """A mask or a segment table that attention would misread."""


class LoaderError(TruebatchError, RuntimeError):
    """A worker raised, died or hung while loading a named sample."""


class LawError(TruebatchError, RuntimeError):
    """A sample's result depends on what else is in its micro-batch."""


class NonFiniteError(TruebatchError, FloatingPointError):
    """A step is NaN or infinite; the model was not updated."""


class RunError(TruebatchError, RuntimeError):
    """A run folder cannot be used: owned by another process, made with other settings, or not writable."""


class CheckpointError(TruebatchError, RuntimeError):
    """A checkpoint cannot be written, or cannot be trusted."""


class MemoryLimitError(TruebatchError, MemoryError):
    """A sample or an update does not fit into memory, however the step is cut."""


class RestartError(TruebatchError):
    """The run stopped, and resumes when the same command is given again."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error; a run's `status.json` says the same.

    1: a check failed; 2: usage, configuration or the machine; 70: a fault of ours; 75: interrupted, run it again.
    """
    if isinstance(error, KeyboardInterrupt | RestartError):
        return 75
    if isinstance(error, LawError | NonFiniteError):
        return 1
    return 2 if isinstance(error, TruebatchError | OSError | MemoryError) else 70
