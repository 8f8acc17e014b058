"""What all benchmarks share: choices, command lines, result files, scripts."""
