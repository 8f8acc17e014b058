"""Benchmarks that are run as modules: `python -m benchmarks NAME`."""
