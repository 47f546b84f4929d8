"""Cutting of a captured module into the programs of a plan's stages."""
