"""One way in: models, tokenizers and pipelines of folders are loaded in one file, without code and without pickles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADING = "src/truebatch/hf/load.py"
TEMPLATES = "src/truebatch/hf/template_sandbox.py"
ALLOWED = {
    (LOADING, "from_pretrained"),
    (LOADING, "from_config"),
    (TEMPLATES, "apply_chat_template"),
    # Unsloth reads models from a folder alone; this one is written by us the moment before.
    ("benchmarks/training/peers.py", "from_pretrained"),
    # So is the folder that the Trainer of Hugging Face is timed on; it loads as its users load.
    ("benchmarks/training/hf_trainer.py", "from_pretrained"),
    # Shapes of our own, and the two parts inside of a configuration that has been looked at.
    ("benchmarks/model_shapes.py", "from_config"),
    ("benchmarks/scripts/attention_cuda.py", "from_config"),
    ("benchmarks/training/vision.py", "from_config"),
    ("src/truebatch_systems/stitched_llm/model/model.py", "from_config"),
    # Between processes of one run, over a socket of its own.
    ("src/truebatch/data/shared_memory.py", "pickle.loads"),
}
METHODS = ("from_pretrained", "from_config", "apply_chat_template")
WHOLE = ("torch.load", "torch.hub.load", "pickle.load", "pickle.loads", "joblib.load", "yaml.load", "marshal.loads")


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """What is called in a file, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def found(source: str) -> Iterator[tuple[str, ast.Call]]:
    for name, call in calls(source):
        last = name.rpartition(".")[2]
        if last in METHODS:
            yield last, call
        elif name in WHOLE:
            yield name, call


def files() -> Iterator[Path]:
    for folder in ("src", "benchmarks"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_nobody_loads_a_model_or_renders_a_template_elsewhere():
    elsewhere = {
        (str(path.relative_to(ROOT)), name) for path in files() for name, _ in found(path.read_text(encoding="utf-8"))
    }
    assert elsewhere <= ALLOWED, "use truebatch.hf.load and truebatch.hf.template_sandbox"
    assert elsewhere >= ALLOWED, "an exception that is no longer needed"


def test_every_load_is_local_safe_and_without_code():
    for name, call in found((ROOT / LOADING).read_text(encoding="utf-8")):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
        assert given["trust_remote_code"] == "False"
        if name == "from_pretrained":
            assert given["local_files_only"] == "True"
    weighed = [call for name, call in found((ROOT / LOADING).read_text()) if name == "from_pretrained"]
    assert sum("use_safetensors=True" in ast.unparse(call) for call in weighed) == len(weighed) - 1


def test_numpy_never_unpickles():
    for path in files():
        for name, call in calls(path.read_text(encoding="utf-8")):
            if name == "np.load":
                assert "allow_pickle=False" in ast.unparse(call), path


def test_the_rule_sees_what_it_forbids():
    source = (
        "import torch\nAutoModel.from_pretrained('x')\ntorch.load('x')\npickle.loads(b'')\nt.apply_chat_template([])\n"
    )
    assert [name for name, _ in found(source)] == [
        "from_pretrained",
        "torch.load",
        "pickle.loads",
        "apply_chat_template",
    ]
