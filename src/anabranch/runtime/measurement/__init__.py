"""Time and memory of a step, measured on all ranks."""
