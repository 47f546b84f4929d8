"""Explanation of a plan: simulated what-ifs, and bounds of its step."""
