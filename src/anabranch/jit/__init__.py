"""Compilation of inner loops: ``entries`` are called and kept, ``compiler`` makes them."""

from anabranch.jit.entries import begin, bound, entry, is_there, plain

__all__ = ["begin", "bound", "entry", "is_there", "plain"]
