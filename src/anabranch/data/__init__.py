"""The glyphs, drawn from a font, and batches of data sets."""
