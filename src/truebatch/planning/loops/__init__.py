"""The inner loops of planning, run by numba or plain Python."""
