"""The command line: `truebatch COMMAND`. User errors are three lines; internal errors say where to report them.

Exit codes: 0 done; 1 a check failed; 2 usage or configuration; 3 some samples failed; 70 internal error;
75 interrupted, run it again to resume.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import shlex
import sys
import traceback
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer

from truebatch import __version__
from truebatch.cli.commands.census import show_census
from truebatch.cli.commands.config import config_app
from truebatch.cli.commands.diff import show_diff
from truebatch.cli.commands.doctor import show_doctor
from truebatch.cli.commands.env import show_environment
from truebatch.cli.commands.evaluate import show_evaluate
from truebatch.cli.commands.fit import show_fit
from truebatch.cli.commands.generate import show_generate
from truebatch.cli.commands.init import show_init
from truebatch.cli.commands.plan import show_plan
from truebatch.cli.commands.report import show_report, show_watch
from truebatch.cli.commands.run import run_app
from truebatch.cli.commands.score import show_score
from truebatch.cli.commands.show import show_pictures
from truebatch.cli.commands.train import show_train
from truebatch.cli.commands.verify import show_verify
from truebatch.cli.system_commands import add_system_commands
from truebatch.config.aliases import FOREIGN
from truebatch.errors import ConfigError, TruebatchError, exit_code_of
from truebatch.interrupts import DO, EXIT_INTERRUPTED, asked_by, catch_interruptions, finished, interruptible
from truebatch.language.console import filtered, say_error
from truebatch.language.help_page import translate_help
from truebatch.language.locale import Language, language, unknown_language

DONE, USAGE, OUR_FAULT, INTERRUPTED = 0, 2, 70, EXIT_INTERRUPTED
COMPLETING = "_TRUEBATCH_COMPLETE"
"""Set by the completion script that `truebatch --show-completion` prints."""

_MENDING = {
    errno.ENOSPC: "free some space on that disk, then run it again",
    errno.EDQUOT: "free some space or raise the quota, then run it again",
    errno.EACCES: "check who may read and write there, or name another folder",
    errno.EROFS: "name a folder that can be written to",
    errno.ENAMETOOLONG: "use a shorter path",
}
# typer carries its own copy of click in newer versions; its public error class leads to the base in both.
_ClickError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="truebatch",
    help="Run PyTorch models in true batches, proven equal to one sample at a time.",
    epilog="Start with: truebatch demo",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
add_system_commands(app)
app.command("plan", short_help="Show how samples would be grouped.")(show_plan)
app.command("verify", short_help="Prove that a batch equals one by one, or name where it does not.")(show_verify)
app.command("census", short_help="Every Hugging Face architecture: equal, fell back, refused or wrong.")(show_census)
app.command("train", short_help="Train a system or your Hugging Face model; the same command resumes it.")(show_train)
app.command("fit", short_help="Measure memory and speed on your samples; the largest safe budget.")(show_fit)
app.command("evaluate", short_help="The figures of a trained run on held-out samples.")(show_evaluate)
app.command("show", short_help="Pictures of what a trained run does, for its report.")(show_pictures)
app.command("generate", short_help="Text from a trained run, for prompts or in a dialogue.")(show_generate)
app.command("score", short_help="Score or generate for every sample of a file; the same command resumes.")(show_score)
app.add_typer(run_app, name="run", short_help="Look at a scoring run, export it, retry its failures.")
app.command("report", short_help="One HTML file about a run, or about several side by side.")(show_report)
app.command("watch", short_help="Watch runs in the terminal as they go.")(show_watch)
app.command("diff", short_help="Name the first step and tensor at which two runs differ.")(show_diff)
app.command("init", short_help="Write the starting files of a system.")(show_init)
app.command("doctor", short_help="Check this machine; with --drill, kill a small run everywhere and see it recover.")(
    show_doctor
)
app.add_typer(
    config_app, name="config", short_help="Settings: show them with their origin, check them, print their schema."
)
app.command("env", short_help="Describe this machine for a bug report.")(show_environment)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"truebatch {__version__}\n")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works in any position.")
    ] = False,
) -> None:
    """Run PyTorch models in true batches, proven equal to one sample at a time."""


def main() -> None:
    """What the `truebatch` command does once it is imported; `truebatch.__main__` is its entry point."""
    catch_interruptions()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal in GBK or ASCII must not turn a message into an encoding error.
            stream.reconfigure(errors="replace")
    if COMPLETING in os.environ:
        app(prog_name="truebatch")  # A shell requests completions; this ends the process.
    code = run(sys.argv[1:])
    finished(code)
    _flush()
    gc.freeze()  # the end of Python looks through all objects several times: seconds in which nothing is left to do
    sys.exit(code)


def _flush() -> None:
    """A closed terminal would change the exit code to 120 when Python flushes its output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(arguments: list[str], *, commands: typer.Typer = app, name: str = "truebatch") -> int:
    """Run one command line and give its exit code; never raises."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    with filtered():
        return _run(arguments, commands, name, debug=debug)


def _run(arguments: list[str], commands: typer.Typer, name: str, *, debug: bool) -> int:
    try:
        with interruptible():
            code = _invoke(arguments, commands, name)
            finished(code)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except BaseException as error:
        return _report(error, arguments, debug=debug)


def _invoke(arguments: list[str], commands: typer.Typer, name: str) -> int:
    if unknown := unknown_language():
        raise ConfigError(
            "messages are in English or Chinese", seen=f"TRUEBATCH_LANG={unknown}", do="set it to en or zh"
        )
    command = _command(commands, language())
    try:
        with command.make_context(name, list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as done:
        return int(done.exit_code)
    except SystemExit as done:  # --show-completion and --install-completion end this way
        return int(done.code or DONE)
    return code if isinstance(code, int) else DONE


@cache
def _command(commands: typer.Typer, words: Language) -> Any:
    """The commands as built by typer; cached, because it takes a fifth of a second."""
    command = typer.main.get_command(commands)
    if words == "zh":
        translate_help(command)
    return command


def _report(error: BaseException, arguments: list[str], *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort) or (asked_by() and exit_code_of(error) == OUR_FAULT):
        # An interruption in the middle of a library may come out of it as an error of another kind.
        with suppress(OSError):  # the terminal may be gone
            say_error("interrupted", _who_asked(error), DO)
        return INTERRUPTED
    if isinstance(error, TruebatchError):
        say_error(error.wrong, error.seen, error.do)
        return exit_code_of(error)
    if isinstance(error, _ClickError):
        return _report_usage(error, arguments)
    if isinstance(error, OSError):
        say_error(
            f"the system refused: {error.strerror or error}",
            str(error)[:300],
            _MENDING.get(error.errno or 0, "check the path, free space and permissions"),
        )
        return USAGE
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        say_error(
            "the machine ran out of memory",
            str(error)[:300] or "MemoryError",
            "use less data at once, or a larger machine",
        )
        return USAGE
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        say_error(
            "the system refused to start a thread", str(error),
            "free memory, or raise the limit of processes and of memory (ulimit -u, ulimit -v)",
        )  # fmt: skip
        return USAGE
    say_error(
        f"unexpected {type(error).__name__}: this is a fault of truebatch, not yours",
        str(error)[:300] or repr(error),
        "run it again with --debug and send what it prints, with `truebatch env`, to the project's issue tracker",
    )
    return OUR_FAULT


def _who_asked(error: BaseException) -> str:
    name = asked_by() or str(error)
    return "Ctrl-C" if name in ("", "SIGINT") else name


def _is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, according to the system or torch; torch is checked only if it was imported."""
    if isinstance(error, RuntimeError) and "cannot allocate memory" in str(error).lower():
        return True
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        return True  # a library found no room in the address space (ulimit -v)
    if "torch" not in sys.modules:
        return False
    found: bool = importlib.import_module("truebatch.training.memory.oom").is_out_of_memory(error)
    return found


def _report_usage(error: Any, arguments: list[str]) -> int:
    if not arguments or type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(error.ctx.get_help() + "\n" if getattr(error, "ctx", None) else "")
        return USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "truebatch"
    do = _as_setting(error, context) or f"{path} --help"
    say_error(error.format_message(), shlex.join(["truebatch", *arguments]), do)
    return USAGE


def _as_setting(error: Any, context: Any) -> str:
    """A hint for an option that is a setting here, such as --batch_size; empty if it is not one."""
    wanted = str(getattr(error, "option_name", "") or "").lstrip("-").replace("-", "_")
    known = {option for one in getattr(getattr(context, "command", None), "params", ()) for option in one.opts}
    if not wanted or "--set" not in known:
        return ""
    if wanted == "batch_size" and "--samples" in known:
        return "write --samples N: maximum number of samples per forward pass"
    if wanted in ("output_dir", "out_dir", "default_root_dir") and "--out" in known:
        return "write --out FOLDER"
    name = FOREIGN.get(wanted, wanted)
    return f"it is a setting: write --set train.{name}=..." if name in {*FOREIGN.values(), "max_steps", "seed"} else ""
