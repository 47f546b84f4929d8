"""Numerics of a run: precision, random numbers, infinities and NaNs, activations on the host."""
