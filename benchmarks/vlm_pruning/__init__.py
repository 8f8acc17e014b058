"""Benchmarks of vision-token pruning."""
