"""Backends: transformers, HTTP, subprocesses, Ray, functions."""
