"""Benchmarks of the systems."""
