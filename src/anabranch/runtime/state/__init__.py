"""State of a run: parameters, buffers and optimizer, on disk, and in memory that outlives ranks."""
