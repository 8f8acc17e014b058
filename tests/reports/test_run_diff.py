"""Two runs are compared bit for bit: the first step and the tensors that differ are named."""

import json

import pytest
import torch

from truebatch.cli.app import run
from truebatch.errors import RunError
from truebatch.reports.run_diff import diff_runs
from truebatch.training.exactness.digest import joint_digest, parameter_digests, write_digests


def write_run(folder, losses, models=None, **more):
    folder.mkdir()
    models = models or {}
    lines = []
    for step, loss in enumerate(losses, start=1):
        digest = {}
        if step in models:
            digests = parameter_digests(models[step])
            write_digests(folder, step, digests)
            digest = {"digest": joint_digest(digests)}
        lines.append({"step": step, "loss": loss, "seconds": 0.1 * len(folder.name), "fill": 0.5, **digest, **more})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def two_models():
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other[1].bias[0] = torch.nextafter(other[1].bias[0], torch.tensor(9.0))
    return one, other


def test_equal_runs_differ_in_speed_and_fill_alone(tmp_path):
    model, _ = two_models()
    one = write_run(tmp_path / "a", [3.0, 2.0], {2: model})
    other = write_run(tmp_path / "other", [3.0, 2.0], {2: model}, tokens_per_second=9.0)
    found = diff_runs(one, other)
    assert found.is_equal
    assert (found.num_compared, found.num_digests, found.last_equal_digest) == (2, 1, 2)


def test_one_bit_of_one_parameter_is_named(tmp_path):
    same, differs = two_models()
    one = write_run(tmp_path / "a", [3.0, 2.0, 1.0, 0.5], {1: same, 2: same, 4: same})
    other = write_run(tmp_path / "b", [3.0, 2.0, 1.0 + 1e-15, 0.5], {1: same, 2: differs, 4: differs})
    found = diff_runs(one, other)
    assert not found.is_equal
    assert found.first.step == 2
    assert list(found.first.figures) == ["digest"]
    assert (list(found.first.tensors), found.first.num_tensors) == (["1.bias"], 4)
    assert (found.first_digest.step, found.last_equal_digest) == (2, 1)
    said = "\n".join(found.lines())
    assert "the first digest that differs is of step 2; equal until step 1" in said
    assert "1 of 4 tensors differ: 1.bias" in said


def test_the_last_bit_of_a_loss_counts_and_what_only_one_run_has_is_no_difference(tmp_path):
    model, _ = two_models()
    one = write_run(tmp_path / "a", [3.0, 2.0, 1.0], {2: model})
    other = write_run(tmp_path / "b", [3.0, 2.0000000000000004])
    found = diff_runs(one, other)
    assert (found.first.step, dict(found.first.figures)) == (2, {"loss": (2.0, 2.0000000000000004)})
    assert (found.num_compared, found.num_digests) == (2, 0)


def test_runs_without_a_step_in_common_are_not_called_equal(tmp_path):
    found = diff_runs(write_run(tmp_path / "a", []), write_run(tmp_path / "b", [1.0]))
    assert not found.is_equal
    assert "nothing was compared: no step is in both logs" in list(found.lines())


def test_a_folder_without_a_log_is_no_run(tmp_path):
    with pytest.raises(RunError, match="has no log to compare"):
        diff_runs(tmp_path, tmp_path)


def test_the_command_says_so_by_its_exit_code(tmp_path, capsys):
    one, other = write_run(tmp_path / "a", [3.0]), write_run(tmp_path / "b", [4.0])
    assert run(["diff", str(one), str(one)]) == 0
    assert run(["diff", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["first"]["step"] == 1
    assert run(["diff", str(one), str(tmp_path / "none")]) == 2
