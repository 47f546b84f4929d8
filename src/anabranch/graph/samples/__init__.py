"""Dependence of values on the samples of a batch."""
