"""Real data of the benchmarks, downloaded from the package registry, and models of it."""
