"""Checks that a step does not depend on how it is cut."""
