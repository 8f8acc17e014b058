"""`truebatch verify`: is a batch of this model equal to one sample at a time?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from truebatch.cli.run_folder import SystemOption, open_named
from truebatch.errors import ConfigError
from truebatch.language.console import say

CHECK_FAILED = 1


def show_verify(
    target: Annotated[
        str, typer.Argument(help="A system, a run folder, a local model folder, package.module:name or file.py:name.")
    ],
    one: Annotated[
        str | None, typer.Option("--one", help="Your original one-sample function, as a target; compared with TARGET.")
    ] = None,
    samples: Annotated[str | None, typer.Option(help="A list of samples, or a function that returns it.")] = None,
    fields: Annotated[str | None, typer.Option(help="A list of Field, if TARGET takes micro-batches.")] = None,
    objective: Annotated[str | None, typer.Option(help="The loss of the model, as a target.")] = None,
    config: Annotated[Path | None, typer.Option(help="A system: a YAML file with its settings.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=VALUE", help="A system or a run: a setting; overrides the file."),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="Layouts that count: used (right padded and packed), all, right, left, padded or packed."),
    ] = "used",
    quick: Annotated[bool, typer.Option("--quick", help="Only the layouts that count, in few arrangements.")] = False,
    longest: Annotated[
        int | None, typer.Option(help="Cells of your longest sample: one of that length is made if there is none.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of your largest micro-batch: samples are repeated if there are fewer.")
    ] = None,
    tolerance: Annotated[float | None, typer.Option(help="Largest relative difference allowed.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to save the result in, for `report`. Default: the run's own.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another engine: compile, bfloat16 (or another dtype), attn:NAME, int8, merged, a model folder, "
            "a target, or a server such as http://localhost:8000/v1."
        ),
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="A server: the name of the model there.")] = None,
    served_dtype: Annotated[str | None, typer.Option(help="A server: its dtype, such as bfloat16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    system: SystemOption = None,
) -> int:
    """Run the same samples alone, padded, packed, permuted and cut, and compare outputs, loss and gradients.

    TARGET may be the name of a system, a System, a model, a function over samples or micro-batches, or a function
    without arguments that returns one of these or the arguments of truebatch.verify. A system (a new model, on a few of
    its own samples), a run (the trained model) and a Hugging Face model need nothing else. The result for a run is
    saved there as verification.json, and `truebatch report RUN` shows it.

    With --against, the same samples go one at a time through TARGET and through another engine: their difference is
    compared with the effect of rounding alone, and the first module (or, of a server, the first token) that differs is
    named.

    Exit code 0: proven equal in the layouts that count. 1: the law is broken there, or nothing could be proven. 2:
    usage.

    Examples:

      truebatch verify ./my-model

      truebatch verify seqset_vae --set model.latent_dim=32

      truebatch verify runs/chinese_gpt --layout packed

      truebatch verify train.py:setup --quick --longest 4096 --rows 64

      truebatch verify train.py:batched --one train.py:single --samples train.py:samples

      truebatch verify ./my-model --against compile

      truebatch verify ./my-model --against http://localhost:8000/v1 --served-model my-model
    """
    named = {"one": one, "samples": samples, "fields": fields, "objective": objective}
    given = {k: v for k, v in named.items() if v is not None}
    _check_system(target, system)
    engine = _Engine(against, served_model, served_dtype)
    if against is not None:
        refused: dict[str, Any] = {
            "config": config,
            "set": set_,
            "out": out,
            "layout": None if layout == "used" else layout,
        }
        refused |= {"quick": quick, "longest": longest, "rows": rows}
        report = _against(target, given, engine, {**refused, "one": one, "system": system}, tolerance)
        _write(report, as_json)
        return 0 if report.ok else CHECK_FAILED
    engine.check_unused()
    how = {"layout": layout, "tolerance": tolerance, "quick": quick, "longest": longest, "rows": rows}
    report = _report(target, given, config, _Settings(set_ or [], system), how)
    _keep(report, target, out or _own_run(target))
    _write(report, as_json)
    return 0 if report.ok else CHECK_FAILED


@dataclass(frozen=True, slots=True)
class _Engine:
    """What was given of another engine."""

    against: str | None
    served_model: str | None
    served_dtype: str | None

    def check_unused(self) -> None:
        """Reject server options without a server."""
        given = {"--served-model": self.served_model, "--served-dtype": self.served_dtype}
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            raise ConfigError(
                "this option is only for a server",
                seen=f"{unused[0]} without the address of one",
                do="add --against http://HOST:PORT/v1, or omit it",
            )


def _against(target: str, given: dict[str, str], engine: _Engine, refused: dict[str, Any], tolerance: Any) -> Any:
    from truebatch.verification.subjects.cli_target import ask_against

    wrong = [f"--{name}" for name, value in refused.items() if value]
    if wrong:
        raise ConfigError(
            "--against runs the samples one at a time through two engines of a model",
            seen=f"together with {wrong[0]}",
            do=f"omit {wrong[0]}",
        )
    against: Any = engine.against
    if against.lower().startswith(("http://", "https://")):
        from truebatch.verification.engines.server_logprobs import Server

        against = Server(address=against, model=engine.served_model, dtype=engine.served_dtype)
    else:
        engine.check_unused()
    return ask_against(target, given, against, tolerance)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What was given for a system or a run."""

    overrides: list[str]
    system: str | None


def _check_system(target: str, system: str | None) -> None:
    if system is not None and _own_run(target) is None:
        raise ConfigError(
            "--system says which code a run folder belongs to",
            seen=f"--system {system} with {target}, which is not a run folder",
            do="omit --system, and give your code as the target",
        )


def _report(target: str, given: dict[str, str], file: Path | None, asked: _Settings, how: dict[str, Any]) -> Any:
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.cli.settings import checked, read_settings
    from truebatch.plugins import systems
    from truebatch.training.registry import find_system
    from truebatch.verification.api import verify_system, verify_task
    from truebatch.verification.config import VerifyConfig
    from truebatch.verification.subjects.cli_target import ask

    overrides = asked.overrides
    is_run = _own_run(target) is not None
    if target not in systems() and not is_run and file is None and not overrides:
        return ask(target, given, VerifyConfig(**how))
    if given or (is_run and file is not None):
        wrong = [f"--{name}" for name in given] or ["--config"]
        raise ConfigError(
            "a system and a run bring their own samples, loss and settings",
            seen=f"{target} with {', '.join(wrong)}",
            do=f"omit {wrong[0]}; change single settings with --set",
        )
    if is_run:
        trained = open_named(Path(target), overrides, asked.system)
        return verify_task(trained.task, model=trained.model, config=VerifyConfig(**how))
    system = find_system(target)
    return verify_system(system, checked(system, read_settings(file, overrides, {})), config=VerifyConfig(**how))


def _own_run(target: str) -> Path | None:
    """The target itself, where it is a run and not a system of that name."""
    from truebatch.plugins import systems
    from truebatch.training.run_dir.run_dir import CONFIG

    return Path(target) if target not in systems() and (Path(target) / CONFIG).is_file() else None


def _keep(report: Any, target: str, folder: Path | None) -> None:
    from truebatch.reports.verify_section import keep_verification

    if folder is not None:
        keep_verification(folder, {"target": target, **report.as_dict()})


def _write(report: Any, as_json: bool) -> None:
    text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if as_json else str(report)
    say(text)
