"""A stitched model on disk: its adapter with the hashes of its donors, or everything in one folder.

adapter.safetensors + stitch_config.json (what was trained, and on which weights) | merged: save_pretrained of the whole
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from truebatch.errors import CheckpointError, ConfigError, DataError
from truebatch.hf.pretrained import without_chatter
from truebatch.io.atomic_files import apply_umask
from truebatch.io.text_encoding import open_file, read_text
from truebatch_systems.stitched_llm.model.adapter import AdapterShape
from truebatch_systems.stitched_llm.model.donors import Donor, open_donor, spelling_between
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch
from truebatch_systems.stitched_llm.train.trainable_parts import Int8Linear, add_top_lora

WEIGHTS, ABOUT = "adapter.safetensors", "stitch_config.json"
CODE = "stitched_code"
_MOST_BYTES = 1 << 27
_CODE = '''"""Where transformers finds the classes of this model: from_pretrained(..., trust_remote_code=True)."""

from truebatch_systems.stitched_llm.model.hf_config import StitchedConfig
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM

__all__ = ["StitchedConfig", "StitchedForCausalLM"]
'''


def save_adapter(model: StitchedForCausalLM, folder: Path) -> None:
    """Write what was trained, and what it was trained on: cut, adapter, names and hashes of the donors."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad or name.startswith("adapter.")}
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if name in trained}
    save_file(tensors, folder / WEIGHTS)
    apply_umask(folder)
    about = {
        "origin": model.config.origin,
        "adapter": asdict(model.adapter.shape),
        "lora": None if model.lora is None else {"rank": model.lora[0], "alpha": model.lora[1]},
        "vocabulary": None if model.vocabulary is None else model.vocabulary.tolist(),
        "trained": sorted(tensors),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def load_stitched(folder: Path, *, bottom: Any = None, top: Any = None) -> StitchedForCausalLM:
    """The stitched model of a saved adapter over its donors; `CheckpointError` if their weights are not the same.

    Donors are opened where they were when it was saved, unless they are given (a folder, or a model in memory).
    """
    about = _read(folder)
    origin, shape = about["origin"], AdapterShape(**about["adapter"])
    below, above = _donor(bottom, origin["bottom"], "bottom"), _donor(top, origin["top"], "top")
    cut = Cut(
        bottom=origin["cut_bottom"], top=origin["cut_top"], adapter=shape.kind, rank=shape.rank, inner=shape.inner,
        norm=shape.norm,
    )  # fmt: skip
    vocabulary = None if about["vocabulary"] is None else torch.tensor(about["vocabulary"])
    spelling = spelling_between(below, above) if "respelling" in origin else None
    model = stitch(below, above, cut, vocabulary=vocabulary, spelling=spelling)
    for role in ("bottom", "top"):
        then, now = origin[f"{role}_hash"], model.config.origin[f"{role}_hash"]
        if then and then != now:
            raise CheckpointError(
                f"the {role} donor is not the one this adapter was trained on",
                seen=f"{origin[role]}: hash {then[:12]} then, {now[:12]} now",
                do="bring the donor's weights back; an adapter fits only the streams it was trained between",
            )
    if about["lora"] is not None:
        add_top_lora(model, rank=about["lora"]["rank"], alpha=about["lora"]["alpha"])
    _set_weights(model, load_file(folder / WEIGHTS), folder)
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def _set_weights(model: StitchedForCausalLM, tensors: dict[str, Tensor], folder: Path) -> None:
    places = dict(model.named_parameters())
    wrong = [name for name, value in tensors.items() if name not in places or places[name].shape != value.shape]
    if wrong:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit these donors", seen=f"no place for {wrong[:3]}", do="check the folder"
        )
    for name, value in tensors.items():
        if not name.startswith("adapter.") and "lora_" not in name:
            # Never into the donor's own memory.
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.nn.Parameter(value, requires_grad=False))
        else:
            places[name].copy_(value)


def _donor(given: Any, name: str, role: str) -> Donor:
    if isinstance(given, Donor):
        return given
    if given is None and not Path(name).is_dir():
        raise ConfigError(
            f"the {role} donor is not where it was",
            seen=f"no folder {name}",
            do=f"give it: load_stitched(folder, {role}=...)",
        )
    return open_donor(Path(name) if given is None else given, what=f"the {role} donor")


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(read_text(folder / ABOUT, max_bytes=_MOST_BYTES))
        with open_file(folder / WEIGHTS):  # what is no plain file is refused before anything waits for it
            load_file(folder / WEIGHTS)
        return found
    except (DataError, OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no saved adapter", seen=str(error)[:200], do=f"give a folder with {ABOUT} and {WEIGHTS}"
        ) from error


def export_merged(model: StitchedForCausalLM, folder: Path, tokenizer: Any = None) -> None:
    """Both cut donors, the adapter and the tokenizer in one folder, as `AutoModelForCausalLM.from_pretrained` loads it.

    Whoever loads it says trust_remote_code=True, which lets transformers import the class from truebatch, or imports
    truebatch_systems.stitched_llm.model.model first, which registers it.
    """
    has_lora = any("lora_" in name for name, _ in model.named_parameters())
    if has_lora or any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ConfigError(
            "a merged folder holds plain weights",
            seen="LoRA matrices or int8 layers in the model",
            do="export the adapter alone, or train without lora and int8",
        )
    with without_chatter():
        model.save_pretrained(folder)
    apply_umask(folder)
    _point_to_code(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _point_to_code(folder: Path) -> None:
    """Say in config.json where the classes are: transformers has none of its own for this model."""
    (folder / f"{CODE}.py").write_text(_CODE, encoding="utf-8")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    places = {"AutoConfig": f"{CODE}.StitchedConfig", "AutoModelForCausalLM": f"{CODE}.StitchedForCausalLM"}
    file.write_text(json.dumps({**config, "auto_map": places}, indent=2) + "\n", encoding="utf-8")
