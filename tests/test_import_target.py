"""Names in the user's own code: found, or the reason shown."""

from __future__ import annotations

import pytest

from truebatch.errors import ConfigError
from truebatch.import_target import call_target, is_target, resolve_target


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the user's own code, as the current folder."""
    (tmp_path / "mydata.py").write_text(
        "import beside\nsamples = [[1, 2], [3]]\nclass Box:\n    inner = beside.value\n"
    )
    (tmp_path / "beside.py").write_text("value = 7\n")
    (tmp_path / "random.py").write_text("samples = 'not the standard library'\n")
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "unparsable.py").write_text("x = 1\nif x\n")
    (tmp_path / "needs.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "stops.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "tb_pkg").mkdir()
    (tmp_path / "tb_pkg" / "__init__.py").write_text("")
    (tmp_path / "tb_pkg" / "part.py").write_text("samples = [1, 2, 3]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_a_module_and_an_attribute_inside_are_found(project):
    assert resolve_target("mydata.py:samples") == [[1, 2], [3]]
    assert resolve_target(f"{project}/mydata.py:samples") == [[1, 2], [3]]
    assert resolve_target("mydata.py:Box.inner") == 7
    assert resolve_target("tb_pkg.part:samples") == [1, 2, 3]


def test_a_file_named_like_a_standard_module_does_not_replace_it(project):
    assert resolve_target("random.py:samples") == "not the standard library"
    import random

    assert random.random() < 1


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("mydata.py", ["file.py:name", "'mydata.py'", "mydata.py:samples"]),
        ("mydata.py:", ["file.py:name"]),
        (":samples", ["file.py:name"]),
        ("mydata.py：samples", ["full-width"]),
        ("mydat.py:samples", ["no file mydat.py", "did you mean 'mydata.py'"]),
        ("mydata.py:sample", ["no 'sample'", "did you mean 'samples'", "Box"]),
        ("mydata.py:Box.iner", ["did you mean 'inner'"]),
        ("broken.py:x", ["ZeroDivisionError", "broken.py:2", "y = x / 0"]),
        ("unparsable.py:x", ["SyntaxError", "unparsable.py:2", "if x"]),
        ("needs.py:x", ["a_package_nobody_has", "needs.py:1"]),
        ("stops.py:x", ["SystemExit", "stops.py:1"]),
        ("no_such_module_here:x", ["no module 'no_such_module_here'"]),
        ("tb_pkg.prt:x", ["no module 'tb_pkg.prt'"]),
        ("not a module:x", ["neither a .py file nor a module name"]),
    ],
)
def test_every_way_to_fail_is_named(project, target, expected):
    with pytest.raises(ConfigError) as caught:
        resolve_target(target)
    assert [word for word in expected if word not in str(caught.value)] == []


def test_the_line_of_the_users_function_is_shown(project):
    (project / "late.py").write_text("def samples():\n    return {}['missing']\n")
    with pytest.raises(ConfigError, match=r"late\.py:2: return"):
        call_target("late.py:samples", resolve_target("late.py:samples"))


def test_a_plain_file_name_is_no_target():
    assert is_target("a.py:b")
    assert is_target("a.b:c.d")
    assert not is_target("train.jsonl")
    assert not is_target("C:\\data\\train.jsonl")
