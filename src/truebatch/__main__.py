"""The program `truebatch`, also as `python -m truebatch`: signals are caught before anything that takes time is imported."""

from importlib import import_module

from truebatch.interrupts import catch_interruptions
from truebatch.progress import showing


def main() -> None:
    """Entry point of the `truebatch` command."""
    catch_interruptions()
    with showing():
        import_module("truebatch.cli.app").main()


if __name__ == "__main__":
    main()
