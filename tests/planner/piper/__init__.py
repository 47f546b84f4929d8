"""Tests of planner piper."""
