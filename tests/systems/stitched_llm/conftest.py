"""Two donors that have learned something, made once for all tests that need them."""

import os

import pytest

from truebatch_systems.stitched_llm.data.toy_donors import embedded_folder, ensure_donors

SMALL = {"made_up_samples": 240, "donor_steps": 60}
"""Settings of the embedded example in these tests."""


@pytest.fixture(scope="session")
def cached(tmp_path_factory):
    """A cache folder in which the embedded donors are trained already; other fixtures and commands use it too."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("TRUEBATCH_CACHE")
    os.environ["TRUEBATCH_CACHE"] = str(folder)
    home = embedded_folder(samples=SMALL["made_up_samples"], steps=SMALL["donor_steps"], seed=0)
    ensure_donors(home, steps=SMALL["donor_steps"], seed=0)
    yield home
    if before is None:
        del os.environ["TRUEBATCH_CACHE"]
    else:
        os.environ["TRUEBATCH_CACHE"] = before
