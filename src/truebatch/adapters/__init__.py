"""Adapters: planned steps and exact losses in existing training loops."""
