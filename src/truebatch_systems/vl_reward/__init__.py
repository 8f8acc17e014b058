"""An edit-then-judge benchmark whose numbers are measurements: a failure is a status, never a score."""
