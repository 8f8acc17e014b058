"""`truebatch verify`: is a batch of this model equal to one sample at a time?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import AsJson, SystemOption, changed_options, refuse_changed, with_option_groups
from truebatch.cli.run_folder import open_named
from truebatch.errors import ConfigError
from truebatch.language.console import shown
from truebatch.language.translate import in_words

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.verification.engines.report import AgainstReport
    from truebatch.verification.report import VerifyReport

CHECK_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectOptions:
    """What goes with a model or a function that is verified."""

    one: Annotated[
        str | None, typer.Option("--one", help="Your original one-sample function, as a target; compared with TARGET.")
    ] = None
    samples: Annotated[str | None, typer.Option(help="A list of samples, or a function that returns it.")] = None
    fields: Annotated[str | None, typer.Option(help="A list of Field, if TARGET takes micro-batches.")] = None
    objective: Annotated[str | None, typer.Option(help="The loss of the model, as a target.")] = None

    def given(self) -> dict[str, str]:
        """The targets that were named."""
        return {name: getattr(self, name) for name in changed_options(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsOptions:
    """Settings of a system or a run."""

    config: Annotated[Path | None, typer.Option(help="A system: a YAML file with its settings.")] = None
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=VALUE", help="A system or a run: a setting; overrides the file."),
    ] = None
    system: SystemOption = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangementOptions:
    """In what arrangements the samples are compared."""

    layout: Annotated[
        str,
        typer.Option(help="Layouts that count: used (right padded and packed), all, right, left, padded or packed."),
    ] = "used"
    quick: Annotated[bool, typer.Option("--quick", help="Only the layouts that count, in few arrangements.")] = False
    longest: Annotated[
        int | None, typer.Option(help="Cells of your longest sample: one of that length is made if there is none.")
    ] = None
    rows: Annotated[
        int | None, typer.Option(help="Rows of your largest micro-batch: samples are repeated if there are fewer.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Another engine to compare with."""

    against: Annotated[
        str | None,
        typer.Option(
            help="Another engine: compile, bfloat16 (or another dtype), attn:NAME, int8, merged, a model folder, "
            "a target, or a server such as http://localhost:8000/v1."
        ),
    ] = None
    served_model: Annotated[str | None, typer.Option(help="A server: the name of the model there.")] = None
    served_dtype: Annotated[str | None, typer.Option(help="A server: its dtype, such as bfloat16.")] = None

    def is_server(self) -> bool:
        """True if the other engine is a server."""
        return (self.against or "").lower().startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultOptions:
    """When a difference is too large, and where the result goes."""

    tolerance: Annotated[float | None, typer.Option(help="Largest relative difference allowed.")] = None
    exactness: Annotated[
        str,
        typer.Option(
            help="rounding, or bits: loss and gradients of a step must not change in a bit, however its atoms are run."
        ),
    ] = "rounding"
    out: Annotated[
        Path | None, typer.Option(help="Folder to save the result in, for `report`. Default: the run's own.")
    ] = None
    summary: Annotated[
        Path | None, typer.Option(help="Append the result as Markdown to a file, such as $GITHUB_STEP_SUMMARY.")
    ] = None
    as_json: AsJson = False


@with_option_groups
def show_verify(
    target: Annotated[
        str, typer.Argument(help="A system, a run folder, a local model folder, package.module:name or file.py:name.")
    ],
    subject: SubjectOptions,
    settings: SettingsOptions,
    arrangement: ArrangementOptions,
    engine: EngineOptions,
    result: ResultOptions,
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

      truebatch verify ./my-model --exactness bits

      truebatch verify ./my-model --against compile

      truebatch verify ./my-model --against http://localhost:8000/v1 --served-model my-model
    """
    _check_use(target, settings, engine)
    if engine.against is not None:
        refuse_changed(
            settings, arrangement, SubjectOptions(one=subject.one),
            ResultOptions(out=result.out, exactness=result.exactness),
            wrong="--against runs the samples one at a time through two engines of a model",
        )  # fmt: skip
        other = _compare_engines(target, subject.given(), engine, result.tolerance)
        return _print(other, in_words(str(other)), target, result)
    report = _verify(
        target,
        subject.given(),
        settings,
        {**asdict(arrangement), "tolerance": result.tolerance, "exactness": result.exactness},
    )
    _keep(report, target, result.out or _own_run(target))
    return _print(report, report.text(in_words), target, result)


def _print(report: AgainstReport | VerifyReport, text: str, target: str, result: ResultOptions) -> int:
    if result.summary is not None:
        _append_summary(result.summary, target, report)
    text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if result.as_json else text
    sys.stdout.write(shown(text) + "\n")
    return 0 if report.ok else CHECK_FAILED


def _append_summary(file: Path, target: str, report: AgainstReport | VerifyReport) -> None:
    from truebatch.verification.markdown import report_markdown

    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(report_markdown(target, report) + "\n")
    except OSError as error:
        raise ConfigError(
            "the summary cannot be written", seen=f"{file}: {error.strerror}", do="name a file in a folder that exists"
        ) from error


def _check_use(target: str, settings: SettingsOptions, engine: EngineOptions) -> None:
    if settings.system is not None and _own_run(target) is None:
        raise ConfigError(
            "--system says which code a run folder belongs to",
            seen=f"--system {settings.system} with {target}, which is not a run folder",
            do="omit --system, and give your code as the target",
        )
    if not engine.is_server():
        refuse_changed(
            replace(engine, against=None),
            wrong="this option is only for a server",
            do="add --against http://HOST:PORT/v1, or omit it",
        )


def _compare_engines(
    target: str, given: dict[str, str], engine: EngineOptions, tolerance: float | None
) -> AgainstReport:
    from truebatch.verification.engines.server_logprobs import Server
    from truebatch.verification.subjects.cli_target import ask_against

    assert engine.against is not None
    other: Any = engine.against
    if engine.is_server():
        other = Server(address=engine.against, model=engine.served_model, dtype=engine.served_dtype)
    return ask_against(target, given, other, tolerance)


def _verify(target: str, given: dict[str, str], settings: SettingsOptions, how: dict[str, Any]) -> VerifyReport:
    from truebatch.cli.settings import checked, read_settings
    from truebatch.plugins import systems
    from truebatch.training.registry import find_system
    from truebatch.verification.api import verify_system, verify_task
    from truebatch.verification.config import VerifyConfig
    from truebatch.verification.subjects.cli_target import ask

    overrides, file = settings.set_ or [], settings.config
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
        trained = open_named(Path(target), overrides, settings.system)
        return verify_task(trained.task, model=trained.model, config=VerifyConfig(**how))
    system = find_system(target)
    return verify_system(system, checked(system, read_settings(file, overrides, {})), config=VerifyConfig(**how))


def _own_run(target: str) -> Path | None:
    """The target itself, where it is a run and not a system of that name."""
    from truebatch.plugins import systems
    from truebatch.training.run_dir.run_dir import CONFIG

    return Path(target) if target not in systems() and (Path(target) / CONFIG).is_file() else None


def _keep(report: VerifyReport, target: str, folder: Path | None) -> None:
    from truebatch.reports.sections.verification import keep_verification

    if folder is not None:
        keep_verification(folder, {"target": target, **report.as_dict()})
