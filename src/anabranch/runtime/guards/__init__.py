"""Guards of a run: ranks that start alike, memory that suffices, gradients and failures."""
