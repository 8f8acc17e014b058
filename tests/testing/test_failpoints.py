"""Failpoints: silent unless asked, exact when asked, and all of them listed."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import truebatch
from truebatch.errors import ConfigError
from truebatch.testing.failpoints import ERRORS, FAILPOINTS, VARIABLE, armed, failpoint, parse_failpoint, recorded

ROOT = Path(truebatch.__file__).parent
NAME = next(iter(FAILPOINTS))


def test_every_failpoint_in_the_code_is_listed_and_every_listed_one_is_in_the_code():
    text = "".join(file.read_text(encoding="utf-8") for file in ROOT.rglob("*.py") if file.name != "failpoints.py")
    assert set(re.findall(r'failpoint\(\s*"([^"]+)"', text)) == set(FAILPOINTS)
    assert len(FAILPOINTS) >= 40
    assert not re.findall(r"\bfailpoint\((?!\s*\")", text), "a name must be written out, or the list cannot be checked"


def test_nothing_happens_unless_armed():
    failpoint(NAME)
    with armed(f"{NAME}:eio:1"):
        failpoint("write.opened")
    failpoint(NAME)


@pytest.mark.parametrize("action", ERRORS)
def test_the_nth_visit_and_no_other_raises_the_error_asked_for(action):
    with armed(f"{NAME}:{action}:3"):
        failpoint(NAME)
        failpoint(NAME)
        with pytest.raises(OSError, match=NAME) as caught:
            failpoint(NAME)
        failpoint(NAME)
    assert caught.value.errno == getattr(errno, action.upper())


def test_visits_are_counted_where_a_sweep_asks():
    with recorded() as visits:
        failpoint(NAME)
        failpoint(NAME)
        failpoint("write.opened")
    assert visits == {NAME: 2, "write.opened": 1}


def test_sleeping_lasts_as_long_as_asked():
    with armed(f"{NAME}:sleep:1:0.05"):
        before = time.monotonic()
        failpoint(NAME)
        assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", 86)])
def test_the_environment_variable_arms_a_whole_process(action, code):
    script = f"from truebatch.testing.failpoints import failpoint\nfor _ in range(3): failpoint({NAME!r}); print('x')"
    environment = {**os.environ, VARIABLE: f"{NAME}:{action}:2"}
    done = subprocess.run([sys.executable, "-uc", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code
    assert done.stdout == "x\n"


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("write.opend:kill:1", "write.opened"),
        ("write.opened:kil:1", "kill"),
        ("write.opened", "name:action:nth"),
        ("write.opened:kill:one", "number"),
        ("write.opened:kill:1:2:3", "name:action:nth"),
        ("", "name:action:nth"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_was_meant(spec, word):
    with pytest.raises(ConfigError, match=word):
        parse_failpoint(spec)
