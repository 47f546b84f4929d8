"""Asynchronous plans for the models of ``tests.runtime.small``."""

from dataclasses import replace
from typing import Any

from anabranch.plans.plan import Plan
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import asynchronous_stages
from tests.runtime import small


def async_plan(model: small.Built, num_stages: int, **options: Any) -> Plan:
    """For the models of the synchronous tests."""
    chosen = small.plan(model, num_stages, batch_size=8, microbatch_size=8, **options)
    return replace(chosen, stage_graph=asynchronous_stages(chosen), mode="async", policy="stash")


def built_pipeline(model: small.Built, chosen: Plan, policy: Any = "stash", **o: Any) -> Any:
    options = {"captured": model.captured, "check_gradients": False, "timeout": 20.0} | o
    return AsyncPipeline(options.pop("workload", model.workload), chosen, policy=policy, **options)
