"""Settings from YAML and overrides: right ones load, wrong ones are named."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.config.load import config_schema, dump_config, load_config
from truebatch.config.yaml_files import parse_yaml, write_yaml
from truebatch.errors import ConfigError, TruebatchError
from truebatch.planning.config import PlanConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How weights change."""

    lr: float = 1e-3
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A configuration as the rooms write them."""

    name: str = "run"
    samples_per_step: int = 8
    layout: Literal["padded", "packed"] = "padded"
    true_batch: Literal["on", "off", "compare"] = "on"
    shuffle: bool = True
    limit: int | None = None
    stops: list[int] = field(default_factory=list)
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        if self.samples_per_step < 1:
            raise ConfigError("no samples", seen=f"samples_per_step={self.samples_per_step}", do="give at least 1")


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> Settings:
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(Settings, file, overrides=overrides)


def test_a_file_and_overrides_become_one_value_and_the_later_wins(tmp_path):
    loaded = load(
        tmp_path, "name: 中文\nsamples_per_step: 4\noptimizer:\n  lr: 1e-4\n", "samples_per_step=64", "stops=[1, 2]"
    )
    assert loaded == Settings(name="中文", samples_per_step=64, stops=[1, 2], optimizer=Optimizer(lr=1e-4))


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "1e-04", "+1e-4"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path, text):
    assert load(tmp_path, f"optimizer: {{lr: {text}}}\n").optimizer.lr == 1e-4
    assert load(tmp_path, "", f"optimizer.lr={text}").optimizer.lr == 1e-4


def test_on_and_off_are_words_where_words_are_meant_and_switches_where_switches_are(tmp_path):
    loaded = load(tmp_path, "true_batch: off\nshuffle: no\n")
    assert loaded.true_batch == "off"
    assert loaded.shuffle is False


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load(tmp_path, "# nothing\n") == Settings()


WRONG = {
    "unknown key": ("sample_per_step: 4\n", ["sample_per_step", "did you mean 'samples_per_step'", "run.yaml:1"]),
    "unknown nested key": ("optimizer:\n  lrr: 1\n", ["optimizer.lrr", "'lr'", "run.yaml:2"]),
    "wrong choice": ("layout: paded\n", ["layout", "'paded'", "'padded'", "run.yaml:1"]),
    "wrong type": ("\nsamples_per_step: many\n", ["samples_per_step", "'many'", "run.yaml:2"]),
    "wrong type in a union": ("limit: lots\n", ["limit", "'lots'", "run.yaml:1"]),
    "wrong type in a list": ("stops: [1, x]\n", ["stops.1", "'x'", "run.yaml:1"]),
    "truth as a number": ("samples_per_step: true\n", ["samples_per_step", "true", "run.yaml:1"]),
    "a number as text": ("name: 12\n", ["name", "12", "run.yaml:1"]),
    "checked by itself": ("samples_per_step: 0\n", ["samples_per_step=0"]),
    "full-width colon": ("name: a\nlayout：packed\n", ["run.yaml:2", "full-width", "'：'"]),
    "full-width colon alone": ("layout：packed\n", ["run.yaml:1", "full-width", "'：'"]),
    "full-width colon before a block": ("optimizer：\n  lr: 1\n", ["run.yaml:1", "full-width", "'：'"]),
    "full-width comma": ("stops: [1，2]\n", ["run.yaml:1", "full-width", "'，'"]),
    "full-width space": ("optimizer:\n　lr: 1\n", ["run.yaml:2", "full-width", "a space"]),
    "full-width space after the colon": ("name:　a\n", ["run.yaml:1", "full-width"]),
    "full-width quotes": ("name: “a”\n", ["run.yaml:1", "full-width", "“"]),
    "full-width digits": ("samples_per_step: ８\n", ["run.yaml:1", "full-width", "８"]),
    "tab": ("optimizer:\n\tlr: 1\n", ["run.yaml:2", "tab", "spaces"]),
    "broken": ("name: [1, 2\nlayout: padded\n", ["run.yaml:", "not readable as YAML"]),
    "twice": ("name: a\nlayout: padded\nname: b\n", ["run.yaml:3", "'name'", "twice", "run.yaml:1"]),
    "not a mapping": ("- a\n- b\n", ["run.yaml:1", "key: value", "a list"]),
    "only text": ("hello\n", ["run.yaml:1", "hello"]),
    "tag": (
        "name: !!python/object/apply:os.system ['true']\n",
        ["run.yaml:1", "YAML tags are not supported", "!!python"],
    ),
    "two documents": ("name: a\n---\nname: b\n", ["run.yaml:"]),
    "control character": ("name: a\x07\n", ["run.yaml:1", "\\x07"]),
    "a mapping for a key": ("? [a, b]\n: 1\n", ["run.yaml:1", "plain name"]),
    "merge key": ("optimizer: &o\n  lr: 1\nx:\n  <<: *o\n", ["run.yaml:4"]),
    "GBK": ("name: 训练\n".encode("gbk"), ["run.yaml:1", "GBK", "iconv -f GB18030 -t UTF-8"]),
    "UTF-16": ("name: a\n".encode("utf-16"), ["UTF-16", "iconv -f UTF-16"]),
    "NUL": (b"name: a\0b\n", ["run.yaml:1", "NUL"]),
    "too large": (b"# " + b"x" * (1 << 20) + b"\n", ["run.yaml", "too large", "1,048"]),
    "deep": ("name: " + "[" * 2000 + "]" * 2000 + "\n", ["run.yaml"]),
    "recursive alias": ("name: &a [*a]\n", ["run.yaml", "too many values"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_with_its_place_and_the_value(tmp_path, case):
    text, expected = WRONG[case]
    with pytest.raises(TruebatchError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert error.wrong
    assert error.seen
    assert error.do
    assert [word for word in expected if word not in str(error)] == []


@pytest.mark.skipif(shutil.which("iconv") is None, reason="iconv is not installed")
@pytest.mark.parametrize("encoding", ["gbk", "utf-16"])
def test_the_command_that_converts_a_file_makes_it_readable(tmp_path, encoding):
    file = tmp_path / "my run.yaml"
    file.write_bytes("name: 训练\n".encode(encoding))
    with pytest.raises(TruebatchError) as caught:
        load_config(Settings, file)
    subprocess.run(caught.value.do.removeprefix("convert it: "), shell=True, check=True)
    assert load_config(Settings, tmp_path / "utf8-my run.yaml").name == "训练"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert load(tmp_path, b"\xef\xbb\xbfname: a\n").name == "a"


def test_full_width_marks_inside_prose_are_left_alone(tmp_path):
    text = "name: 你好，世界：再见\n"
    assert load(tmp_path, text).name == "你好，世界：再见"
    assert load(tmp_path, "name: |\n  第一行：\n  “引用”，第二行\n").name == "第一行：\n“引用”，第二行\n"


def test_an_alias_bomb_is_refused_before_it_grows(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    with pytest.raises(ConfigError, match="too many values"):
        load(tmp_path, "\n".join(lines))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("samples_per_step", "key=value"),
        ("=4", "key=value"),
        ("a..b=4", "key=value"),
        ("samples_per_step＝4", "full-width"),
        ("samples_per_stp=4", "did you mean 'samples_per_step'"),
        ("name.first=4", "holds a single value"),
        ("samples_per_step=four", "override 'samples_per_step=four'"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path, override, expected):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "name: a\n", override)
    assert expected in str(caught.value)


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    (tmp_path / "train.yaml").write_text("name: a\n")
    with pytest.raises(TruebatchError, match=r"did you mean 'train\.yaml'"):
        load_config(Settings, tmp_path / "trian.yaml")


def test_a_missing_required_key_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        cells: int

    with pytest.raises(ConfigError, match="required key 'cells' is missing"):
        load_config(Needs)


def test_what_is_dumped_loads_again(tmp_path):
    config = Settings(name="off", true_batch="off", limit=3, stops=[1], optimizer=Optimizer(lr=1e-7))
    assert load(tmp_path, dump_config(config)) == config
    plan = PlanConfig(cells=512, costs={"patches": 9})
    (tmp_path / "plan.yaml").write_text(dump_config(plan))
    assert load_config(PlanConfig, tmp_path / "plan.yaml") == plan


def test_the_schema_refuses_what_loading_refuses():
    schema = config_schema(Settings)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Optimizer"]["additionalProperties"] is False
    assert schema["properties"]["layout"]["enum"] == ["padded", "packed"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=8), TREES, max_size=4))
def test_any_value_written_as_yaml_reads_back_the_same(values):
    assert parse_yaml(write_yaml(values), name="x").values == values


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60) | st.text(alphabet="ab:-[]{}&*!|>'\"#%@,? \n\t：，　“”", max_size=40))
def test_any_text_either_reads_or_is_refused_in_three_parts(text):
    refused = _refusal(text)
    assert refused is None or (refused.wrong.startswith("x") and refused.seen and refused.do)


def _refusal(text: str) -> TruebatchError | None:
    try:
        parse_yaml(text, name="x")
    except TruebatchError as error:
        return error
    return None


@dataclass(frozen=True, kw_only=True)
class Asking:
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Asked:
    prompts: dict[str, Asking] = field(default_factory=dict)


def test_settings_by_names_of_the_users_own_are_checked_inside(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("prompts:\n  物理: {words: a}\n", encoding="utf-8")
    assert load_config(Asked, path).prompts["物理"].words == "a"
    path.write_text("prompts:\n  物理: {wrds: a}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.物理\.wrds"):
        load_config(Asked, path)
