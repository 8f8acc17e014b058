"""Measurements that a user can make again: each is a command, and its table says which."""
