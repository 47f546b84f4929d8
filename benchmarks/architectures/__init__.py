"""Architectures of others, captured untouched and compared with one process."""
