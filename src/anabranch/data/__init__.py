"""Batches of DataLoaders and data sets, and the glyphs, which are drawn from a font."""
