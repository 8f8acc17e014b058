"""Why a batch differs: causes, the first module that differs, small probes."""
