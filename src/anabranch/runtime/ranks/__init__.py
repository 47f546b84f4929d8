"""Ranks of a run: their mesh, process groups, devices, and starts."""
