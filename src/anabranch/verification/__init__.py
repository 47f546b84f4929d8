"""Comparison of a pipeline with the user's own module in one process."""

from anabranch.verification.even import even_plan as even_plan
from anabranch.verification.result import VerifyResult as VerifyResult
from anabranch.verification.step import verify as verify
