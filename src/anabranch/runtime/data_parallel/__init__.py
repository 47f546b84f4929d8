"""Gradients from the backwards to the update: summed over their holders, clipped, applied."""
