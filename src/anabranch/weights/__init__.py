"""Weight policies by name; see ``weights.base``."""
