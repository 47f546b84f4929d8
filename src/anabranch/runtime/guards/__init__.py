"""Guards of a run: equal starts of ranks, enough memory, right gradients, failures."""
