"""What edits a picture: a diffusers pipeline, a folder of ready pictures, or a script. One interface for all.

An editor that cannot edit raises: a failed edit is a status, and never the source picture in disguise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from truebatch.errors import ConfigError, DataError
from truebatch.hf.load import load_pipeline
from truebatch.io.atomic_files import read_json
from truebatch.io.images import rgb_image
from truebatch.planning.lengths.image_size import opened_image

AUTO_CLASS = "diffusers:DiffusionPipeline"
"""The folder says which pipeline it is."""


class Editor(Protocol):
    """A model that follows an instruction on a picture."""

    def describe(self) -> Mapping[str, Any]:
        """Everything an edit depends on beside the picture, the instruction and the seed."""

    def load(self) -> None:
        """Get ready; called once, before the first edit."""

    def edit(self, image: Any, instruction: str, *, seed: int, name: str) -> Any:
        """The edited picture. `name` is where it will be kept, relative to the folder of pictures."""

    def unload(self) -> None:
        """Give everything back; called once, also after an error."""


@dataclass(frozen=True, slots=True)
class FolderEditor:
    """Pictures that are there already, as `<category>/<id>.png`."""

    folder: Path

    def describe(self) -> Mapping[str, Any]:
        """The folder."""
        return {"editor": "folder", "folder": str(self.folder)}

    def load(self) -> None:
        """Look for the folder, before anything is judged."""
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder {self.folder}", seen="editor: folder", do="check the path")

    def edit(self, image: Any, instruction: str, *, seed: int, name: str) -> Any:
        """The picture of that name, as PNG or JPEG."""
        for suffix in (".png", ".jpg", ".jpeg", ".webp"):
            path = (self.folder / name).with_suffix(suffix)
            if path.is_file():
                with opened_image(path) as opened:
                    return rgb_image(opened)
        raise DataError("there is no edited picture", seen=str(self.folder / name), do="edit it, or leave it as failed")

    def unload(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class ScriptedEditor:
    """A function as an editor, for tests and for the embedded benchmark."""

    edited: Callable[[Any, str, int], Any]
    name: str = "scripted"
    loaded: list[str] = field(default_factory=list)
    """What happened, in order: `load` and `unload`."""

    def describe(self) -> Mapping[str, Any]:
        """Its name."""
        return {"editor": "scripted", "name": self.name}

    def load(self) -> None:
        """Note it."""
        self.loaded.append("load")

    def edit(self, image: Any, instruction: str, *, seed: int, name: str) -> Any:
        """What the function gives."""
        return self.edited(image, instruction, seed)

    def unload(self) -> None:
        """Note it."""
        self.loaded.append("unload")


@dataclass(slots=True)
class DiffusersEditor:
    """A pipeline of diffusers on one device; needs the extra `diffusers`."""

    model_name: str
    class_path: str = AUTO_CLASS
    device: str = "cuda"
    dtype: str = "bfloat16"
    params: Mapping[str, Any] = field(default_factory=dict)
    """Handed to every call: num_inference_steps, true_cfg_scale, negative_prompt and so on."""
    pipeline: Any = None

    def describe(self) -> Mapping[str, Any]:
        """Model, class, dtype and parameters; the device does not matter."""
        about = {"editor": "diffusers", "model": self.model_name, "class": self.class_path, "dtype": self.dtype}
        return {**about, "params": dict(self.params)}

    def load(self) -> None:
        """Load the weights onto the device."""
        import torch

        kind = import_class(self.class_path)
        loaded = load_pipeline(kind, self.model_name, torch_dtype=getattr(torch, self.dtype))
        self.pipeline = loaded.to(self.device)
        self.pipeline.set_progress_bar_config(disable=True)

    def edit(self, image: Any, instruction: str, *, seed: int, name: str) -> Any:
        """One edit with a generator of its own: which device it runs on, and after what, does not matter."""
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        return self.pipeline(image=image, prompt=instruction, generator=generator, **self.params).images[0]

    def unload(self) -> None:
        """Forget the pipeline and give its memory back."""
        import gc

        import torch

        self.pipeline = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def import_class(class_path: str) -> Any:
    """The class named as module:Class."""
    place, _, name = class_path.partition(":")
    try:
        return getattr(import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the editor {class_path} cannot be loaded",
            seen=f"{type(error).__name__}: {error}",
            do="pip install 'truebatch[diffusers]', and name the class as module:Class",
        ) from error


def pipeline_class(folder: Path, class_path: str) -> Any:
    """The class of a pipeline: the one that is named, or for `DiffusionPipeline` the one that the folder names."""
    kind = import_class(class_path)
    if class_path != AUTO_CLASS:
        return kind
    index = folder / "model_index.json"
    name = read_json(index).get("_class_name") if index.is_file() else None
    return import_class(f"diffusers:{name}") if isinstance(name, str) else kind


def pipeline_arguments(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of every call, checked against the pipeline's signature before anything is loaded.

    Several pipelines swallow and ignore further keywords: those are refused too.
    """
    accepted = inspect.signature(kind.__call__).parameters
    missing = [name for name in ("image", "prompt", "generator") if name not in accepted]
    if missing:
        raise ConfigError(
            f"{kind.__name__} does not edit a picture by an instruction",
            seen=f"it takes no {', '.join(missing)}",
            do="name another class with diffusion_model.class_path, such as diffusers:StableDiffusionXLImg2ImgPipeline",
        )
    unknown = [name for name in given if name not in accepted or name in ("image", "prompt", "generator")]
    if unknown:
        raise ConfigError(
            f"{kind.__name__} does not take these settings",
            seen=", ".join(f"diffusion_model.params.{name}" for name in unknown),
            do=f"leave them out; it takes {', '.join(name for name in accepted if name not in ('self', 'kwargs'))}",
        )
    cfg = accepted.get("true_cfg_scale")
    scale = given.get("true_cfg_scale", cfg.default if cfg else 0)
    needs_negative = "negative_prompt" in accepted and "negative_prompt" not in given
    if cfg is not None and needs_negative and isinstance(scale, int | float) and scale > 1:
        return {**given, "negative_prompt": " "}  # without one the scale has no effect
    return dict(given)
