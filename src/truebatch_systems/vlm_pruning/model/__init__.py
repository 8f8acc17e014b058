"""Pruners, masks and mergers beside a frozen backbone."""
