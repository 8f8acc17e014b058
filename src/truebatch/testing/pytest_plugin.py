"""The pytest plugin: the fixture `assert_batchable`, and `pytest --truebatch TARGET` as one more test.

Loaded in every pytest run of an environment with truebatch, so nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

_OPTION = "--truebatch"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that adds tests."""
    parser.getgroup("truebatch").addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="TARGET",
        help="verify a model folder, module:name or file.py:name as one more test; may be given several times",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """One test for each target."""
    items += [
        VerifyItem.from_parent(session, name=f"truebatch[{target}]", target=target) for target in _targets(config)
    ]


def _targets(config: pytest.Config) -> list[str]:
    found: list[str] = config.getoption(_OPTION)
    return list(dict.fromkeys(found))


@pytest.fixture
def assert_batchable() -> Callable[..., Any]:
    """`truebatch.assert_batchable`: a model or function with its samples, proven equal to one by one or the test fails."""
    found: Callable[..., Any] = import_module("truebatch.verification.api").assert_batchable
    return found


class VerifyItem(pytest.Item):
    """A target that must give every sample, in any micro-batch, what it gives it alone."""

    def __init__(self, *, target: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.target = target

    def runtest(self) -> None:
        """Verify the target, as `truebatch verify TARGET` does."""
        config = import_module("truebatch.verification.config").VerifyConfig()
        report = import_module("truebatch.verification.subjects.cli_target").ask(self.target, {}, config)
        self.add_report_section("call", "truebatch", str(report))
        if not report.ok:
            raise NotBatchableError(str(report))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report, or the three parts of an error of the user's; the traceback of anything else."""
        user_error = import_module("truebatch.errors").TruebatchError
        if isinstance(excinfo.value, NotBatchableError | user_error):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the test is, for the terminal."""
        return self.target, None, self.name


class NotBatchableError(Exception):
    """A target was verified and is not equal to one by one, or nothing was proven; its text is the report."""
