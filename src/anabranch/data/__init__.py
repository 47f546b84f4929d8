"""Data sets on real data that install from the package registry, and batches of them."""
