"""Runs: their measurements, figures in words, and folders."""

from anabranch.record.folder import load_run as load_run
from anabranch.record.folder import new_folder as new_folder
from anabranch.record.folder import save_run as save_run
from anabranch.record.folder import shown_timeline as shown_timeline
from anabranch.record.folder import write_report as write_report
from anabranch.record.run import RECORDED_STEPS as RECORDED_STEPS
from anabranch.record.run import WEIGHED_STEP as WEIGHED_STEP
from anabranch.record.run import Evaluation as Evaluation
from anabranch.record.run import Origin as Origin
from anabranch.record.run import Run as Run
from anabranch.record.run import StepPart as StepPart
