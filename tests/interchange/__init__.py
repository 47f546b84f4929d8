"""Tests of plans for other programs."""
