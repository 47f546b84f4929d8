"""Verbs of the command line, one per file."""
