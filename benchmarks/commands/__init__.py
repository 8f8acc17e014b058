"""Every command of truebatch, typed as a user types it, on a device of choice."""
