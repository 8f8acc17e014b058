"""`python -m truebatch` is the command `truebatch`."""

from truebatch.cli import main

if __name__ == "__main__":
    main()
