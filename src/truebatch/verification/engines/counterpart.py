"""The two engines of one comparison: a model, and the same model compiled, cast, with another attention, or another one.

Ways that share the model's weights change it in place while they are open and put it back, so that no second one is held.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from truebatch.errors import ConfigError
from truebatch.verification.compare import floating_dtype
from truebatch.verification.subjects.subject import Subject

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPELLINGS = (
    "compile, compile:BACKEND, float32, bfloat16, float16, attn:NAME, int8, merged, a model folder or http://..."
)
WIDE = torch.float32
"""Structure is judged in it where one of two engines runs in half precision."""
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Opened = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One way to run the samples."""

    name: str
    """As a person would say it."""
    subject: Subject
    dtype: torch.dtype
    """What it computes in."""
    opened: Opened
    """The model made into this way, until it is closed."""
    kind: Literal["plain", "compiled", "quantised"] = "plain"

    @property
    def model(self) -> nn.Module:
        """The model, as it is before the way is opened."""
        assert self.subject.model is not None
        return self.subject.model

    @contextmanager
    def running(self, wide: torch.dtype | None = None) -> Iterator[nn.Module]:
        """The model that runs, in its own dtype or with its own weights in a wider one."""
        widened = nullcontext() if wide is None else cast(self.model, wide)
        ways = [self.opened(self.model), widened]
        with ExitStack() as stack:  # compiling comes last: it reads the weights as they are then
            for way in reversed(ways) if self.kind == "compiled" else ways:
                stack.enter_context(way)
            yield self.model


def plain(name: str, subject: Subject) -> Counterpart:
    """A model as it is."""
    return Counterpart(name, subject, floating_dtype(subject.model), _as_it_is)


def counterpart(spec: str, subject: Subject) -> Counterpart:
    """The way that a spelling such as `compile`, `bfloat16` or `attn:sdpa` names, over the model of a subject."""
    assert subject.model is not None
    own = floating_dtype(subject.model)
    word = _SHORT.get(spec, spec)
    if spec == "compile" or spec.startswith("compile:"):
        backend = spec.partition(":")[2] or "inductor"
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            raise ConfigError(
                "an unknown backend of torch.compile",
                seen=backend,
                do=f"name one of {', '.join(torch.compiler.list_backends(exclude_tags=()))}",
            )
        return Counterpart(
            f"the same model compiled with {backend}",
            subject,
            own,
            lambda model: compiled(model, backend),
            kind="compiled",
        )
    if word in DTYPES:
        return Counterpart(f"the same model in {word}", subject, DTYPES[word], lambda model: cast(model, DTYPES[word]))
    if spec.startswith("attn:"):
        name = spec.partition(":")[2]
        _check_attention(subject.model, name)
        return Counterpart(f"the same model with {name} attention", subject, own, lambda model: attention(model, name))
    if spec == "int8":
        return _quantised(subject, own)
    if spec == "merged":
        return _merged(subject, own)
    raise ConfigError("this is nothing to verify against", seen=spec, do=f"give one of {SPELLINGS}")


def is_spelling(text: str) -> bool:
    """True for the words that name a way to run the same weights; anything else is a folder, a target or an address."""
    return _SHORT.get(text, text) in {*DTYPES, "int8", "merged", "compile"} or bool(
        re.match(r"(attn|compile):", text) and not Path(text).exists()
    )


@contextmanager
def cast(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Parameters and kept buffers in another dtype, as loading in that dtype gives; computed buffers stay as they are."""
    parameters = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    buffers = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None and value.is_floating_point() and name not in module._non_persistent_buffers_set
    ]
    try:
        for parameter, data in parameters:
            parameter.data = data.to(dtype)
        for module, name, value in buffers:
            module._buffers[name] = value.to(dtype)
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, value in buffers:
            module._buffers[name] = value


@contextmanager
def compiled(model: nn.Module, backend: str) -> Iterator[None]:
    """The model's calls compiled while open."""
    was = model._compiled_call_impl
    torch.compiler.reset()  # what was compiled for other dtypes counts against the limit of recompiling
    try:
        model.compile(backend=backend)
        yield
    finally:
        model._compiled_call_impl = was


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """A Hugging Face model with another implementation of attention."""
    was = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(was)


def _as_it_is(_model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _check_attention(model: Any, name: str) -> None:
    if not hasattr(model, "set_attn_implementation"):
        raise ConfigError(
            "only a Hugging Face model can be given another attention by name",
            seen=f"{type(model).__name__} with attn:{name}",
            do="build the model with the other attention yourself and pass it as `against`",
        )
    try:
        with attention(model, name):
            is_taken = model.config._attn_implementation == name
    except (ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            "the model cannot be given this attention",
            seen=f"attn:{name}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else error!r}",
            do="name one that it supports and that is installed, such as attn:eager or attn:sdpa",
        ) from error
    if not is_taken:
        _refuse_fixed(model, name)


def _refuse_fixed(model: nn.Module, name: str) -> NoReturn:
    raise ConfigError(
        "the attention of this model cannot be changed once it is built",
        seen=f"{type(model).__name__} with attn:{name}",
        do="load it twice, with attn_implementation=..., and pass the second as `against`",
    )


def _copied(subject: Subject) -> tuple[Any, Subject]:
    model = copy.deepcopy(subject.model)
    return model, replace(subject, model=model)


def _quantised(subject: Subject, own: torch.dtype) -> Counterpart:
    try:
        torchao = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ConfigError(
            "quantising needs the package torchao", seen=str(error), do="pip install 'truebatch[quant]'"
        ) from error
    model, there = _copied(subject)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return Counterpart("the same model with int8 weights", there, own, _as_it_is, kind="quantised")


def _merged(subject: Subject, own: torch.dtype) -> Counterpart:
    model, there = _copied(subject)
    layers = [(n, m) for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "merge")]
    if not layers:
        raise ConfigError(
            "the model has no adapter to merge",
            seen=f"{type(model).__name__} without a layer of peft",
            do="name the adapter's folder as the target, or leave --against merged out",
        )
    for name, layer in layers:
        layer.merge()
        around, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(around), own_name, layer.base_layer)
    return Counterpart("the same model with its adapter merged", there, own, _as_it_is)
