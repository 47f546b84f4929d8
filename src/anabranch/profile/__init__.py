"""Profiles: seconds and bytes of every operator, measured, estimated or read from a file."""
