"""Runs: what happened, the figures that are told of it, and the folder that it leaves."""

from anabranch.record.folder import load_run, new_folder, save_run, write_report
from anabranch.record.run import RECORDED_STEPS, WEIGHED_STEP, Origin, Run, StepPart

__all__ = [
    "RECORDED_STEPS",
    "WEIGHED_STEP",
    "Origin",
    "Run",
    "StepPart",
    "load_run",
    "new_folder",
    "save_run",
    "write_report",
]
