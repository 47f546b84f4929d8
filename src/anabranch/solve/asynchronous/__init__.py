"""Plans without a flush: their search and simulation, and what versions of the weights demand."""
