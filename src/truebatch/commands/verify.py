"""`truebatch verify`: is a batch of this model equal to one sample at a time?"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

CHECK_FAILED = 1


def show_verify(
    target: Annotated[str, typer.Argument(help="package.module:name, file.py:name, or a local model folder.")],
    one: Annotated[
        str | None, typer.Option("--one", help="Your original one-sample function, as a target; compared with TARGET.")
    ] = None,
    samples: Annotated[str | None, typer.Option(help="A list of samples, or a function that returns it.")] = None,
    fields: Annotated[str | None, typer.Option(help="A list of Field, if TARGET takes micro-batches.")] = None,
    objective: Annotated[str | None, typer.Option(help="The loss of the model, as a target.")] = None,
    layout: Annotated[str, typer.Option(help="all, right, left, padded or packed.")] = "all",
    tolerance: Annotated[float | None, typer.Option(help="Largest relative difference allowed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Run the same samples alone, padded, packed, permuted and cut, and compare outputs, loss and gradients.

    TARGET may be a System, a model, a function over samples or micro-batches, or a function without arguments that
    returns one of these or the arguments of truebatch.verify. A Hugging Face model needs nothing else.

    Exit code 0: proven equal. 1: the law is broken, or nothing could be proven. 2: the question was not right.

    Examples:

      truebatch verify ./my-model

      truebatch verify train.py:batched --one train.py:single --samples train.py:samples
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.proof.asking import ask

    named = {"one": one, "samples": samples, "fields": fields, "objective": objective}
    report = ask(target, {k: v for k, v in named.items() if v is not None}, layout=layout, tolerance=tolerance)
    _write(report, as_json)
    return 0 if report.ok else CHECK_FAILED


def _write(report: Any, as_json: bool) -> None:
    text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if as_json else str(report)
    sys.stdout.write(text + "\n")
