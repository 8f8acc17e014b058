"""From a dataset to micro-batches: fetching, worker processes, prefetching."""
