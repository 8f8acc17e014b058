"""Measurements that a user can make again: `python -m benchmarks NAME`, from the root of the repository."""
