"""Devices, processes and collectives."""
