"""The system while the model was verified by its name."""

import pytest

from tests.systems.stitched_llm.conftest import SMALL
from truebatch.cli.app import run

pytestmark = pytest.mark.xdist_group("stitched_donors")


def test_the_system_is_proven_by_its_name(cached, capsys):
    settings = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    code = run(["verify", "stitched_llm", "--layout", "right", "--set", "start_tokens=1024", *settings])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert said.out.startswith("EQUAL")
