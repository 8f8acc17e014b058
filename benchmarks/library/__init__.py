"""Benchmarks of the library itself, on a CPU."""
