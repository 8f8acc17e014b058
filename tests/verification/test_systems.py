"""`truebatch verify` of a system by its name, of a run, and of a System in Python."""

from __future__ import annotations

import pytest

from truebatch import verify
from truebatch.cli.app import run
from truebatch.errors import ConfigError
from truebatch.training.registry import find_system
from truebatch_systems.seqset_vae.system import SEQSET_VAE

STAYS = ["generator.stays=40", "generator.median_hours=6", "model.embedding_dim=16", "model.reduced_dim=8",
         "model.latent_dim=8", "model.inducing_points=2", "model.feedforward_dim=8"]  # fmt: skip
SMALL = {
    "chinese_gpt": [
        "layers=1",
        "embedding_dim=16",
        "hidden_dim=16",
        "heads=2",
        "embedded_statements=60",
        "embedded_dialogues=20",
    ],
    "seqset_vae": STAYS,
}


def ask(capsys, *arguments):
    code = run(["verify", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def with_settings(settings):
    return [part for setting in settings for part in ("--set", setting)]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_system_is_proven_by_its_name(name, capsys):
    code, out, err = ask(capsys, name, "--layout", "right", *with_settings(SMALL[name]))
    assert (code, err) == (0, "")
    assert out.startswith("EQUAL")


def test_a_run_is_proven_with_its_trained_model(tmp_path, capsys):
    folder = tmp_path / "run"
    settings = [*STAYS, "train.max_steps=2", "detector.enabled=false"]
    assert run(["train", "seqset_vae", "--out", str(folder), *with_settings(settings)]) == 0
    said = capsys.readouterr()
    assert "next: truebatch" in said.out + said.err
    code, out, _ = ask(capsys, str(folder), "--layout", "packed")
    assert code == 0
    assert "packed" in out
    code, _, err = ask(capsys, str(folder), "--config", "other.yaml")
    assert code == 2
    assert "--config" in err


def test_what_a_system_brings_along_is_not_given_beside_it(capsys):
    code, _, err = ask(capsys, "seqset_vae", "--samples", "mine.py:samples")
    assert code == 2
    assert "--samples" in err
    with pytest.raises(ConfigError, match="has its own samples"):
        verify(SEQSET_VAE, samples=[1, 2])


def test_a_wrong_setting_and_a_wrong_name_are_told_with_the_nearest(capsys):
    assert "latent_dim" in ask(capsys, "seqset_vae", "--set", "model.latent_dimm=8")[2]
    assert "seqset_vae" in ask(capsys, "seqset_vea", "--set", "model.latent_dim=8")[2]


def test_systems_are_found_by_name_for_this():
    assert all(find_system(name).name == name for name in SMALL)
