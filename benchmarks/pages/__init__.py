"""Size, opening and zoom of pages of large plans."""
