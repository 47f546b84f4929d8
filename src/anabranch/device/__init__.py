"""Kinds of devices and their differences, operations of an accelerator, and the host."""
