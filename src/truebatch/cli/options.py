"""Options that several commands share, and dataclasses of options: every field becomes an option of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from truebatch.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML file with the settings.")]
SystemConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A YAML file: the system's settings, and `train:`.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="A setting; overrides the file.")
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, such as runs/chinese_gpt.")]
RunOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="A setting for this command only.")
]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TARGET", help="A run of your own code: file.py:name or module:name."),
]
"""A folder may name a built-in system only; code of the user's own is named on the command line."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyVariable = Annotated[
    str | None,
    typer.Option(help="The variable with a server's API key; '' sends none. Default: OPENAI_API_KEY if it is set."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HfOptions:
    """A Hugging Face model and its samples, for the system `hf`."""

    model: Annotated[Path | None, typer.Option(help="hf: the folder of your model and tokenizer.")] = None
    data: Annotated[Path | None, typer.Option(help="hf: the samples to train on.")] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="hf: causal_lm, sequence_classification, token_classification, seq2seq, dpo, reward, embedding or vlm."
        ),
    ] = None
    lora: Annotated[bool, typer.Option("--lora", help="hf: train an adapter (LoRA) and keep the model frozen.")] = False

    def settings(self) -> dict[tuple[str, ...], Any]:
        """What was given, by the path of the setting."""
        given = {(name,): value for name in changed_options(self) if (value := getattr(self, name)) is not None}
        return {path: value if value is True else str(value) for path, value in given.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Settings of a pipeline that a system brings, such as vl_reward."""

    config: Annotated[Path | None, typer.Option(help="vl_reward: a YAML file with its settings.")] = None
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="vl_reward: a setting; overrides the file.")
    ] = None


def changed_options(group: Any) -> list[str]:
    """The names of the fields of a dataclass of options that differ from their defaults."""
    return [
        field.name
        for field in fields(group)
        if getattr(group, field.name) != (None if field.default is MISSING else field.default)
    ]


def refuse_changed(*groups: Any, wrong: str, do: str = "") -> None:
    """Raise `ConfigError` if an option of these dataclasses was given: nothing is accepted and ignored."""
    given = [option_name(group, name) for group in groups for name in changed_options(group)]
    if given:
        names = ", ".join(given)
        raise ConfigError(wrong, seen=names, do=do or f"omit {names}")


def option_name(group: Any, field: str) -> str:
    """A field of a dataclass of options as it is typed.

    >>> option_name(HfOptions(), "lora"), option_name(PipelineOptions(), "set_")
    ('--lora', '--set')
    """
    info = get_type_hints(type(group), include_extras=True)[field].__metadata__[0]
    return info.default if isinstance(info.default, str) else f"--{field.replace('_', '-')}"


def with_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose parameters that are dataclasses of options are written out, field by field, for typer."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _written_out(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def flat(**given: Any) -> int:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        return command(**given, **made)

    described: Any = flat
    described.__signature__ = Signature(parameters, return_annotation=int)
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _written_out(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
