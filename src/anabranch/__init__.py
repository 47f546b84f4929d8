"""Train any PyTorch model as a pipeline whose stages form a graph.

The public names load on first use, so that ``import anabranch`` and planning on a saved profile
never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.calibration.kept import calibrated as calibrated
    from anabranch.checkpoint import load_state_dict as load_state_dict
    from anabranch.checkpoint.export import export as export
    from anabranch.cluster import Cluster as Cluster
    from anabranch.data.columns import Columns as Columns
    from anabranch.data.padding import pad_to_bucket as pad_to_bucket
    from anabranch.errors import AnabranchError as AnabranchError
    from anabranch.files import load_cluster as load_cluster
    from anabranch.files import load_plan as load_plan
    from anabranch.files import load_profile as load_profile
    from anabranch.files import save_cluster as save_cluster
    from anabranch.files import save_plan as save_plan
    from anabranch.files import save_profile as save_profile
    from anabranch.files.pipedream import read_profile as read_profile
    from anabranch.graph.capture import capture as capture
    from anabranch.launch import run as run
    from anabranch.plans.plan import Plan as Plan
    from anabranch.profile.estimate import estimate as estimate
    from anabranch.profile.measure import measure as measure
    from anabranch.profile.profile import Profile as Profile
    from anabranch.runtime.asynchronous.pipeline import AsyncPipeline as AsyncPipeline
    from anabranch.runtime.compute.options import ComputeOptions as ComputeOptions
    from anabranch.runtime.measurement.workload import measure_workload as measure_workload
    from anabranch.runtime.pipeline import Pipeline as Pipeline
    from anabranch.solve import compare as compare
    from anabranch.solve import explain as explain
    from anabranch.solve import plan as plan
    from anabranch.solve import simulate as simulate
    from anabranch.timeline import Timeline as Timeline
    from anabranch.training import train as train
    from anabranch.training import train_async as train_async
    from anabranch.verification import verify as verify
    from anabranch.workload import Workload as Workload

_HOME = {
    "AnabranchError": "errors",
    "AsyncPipeline": "runtime.asynchronous.pipeline",
    "Cluster": "cluster",
    "Columns": "data.columns",
    "ComputeOptions": "runtime.compute.options",
    "Pipeline": "runtime.pipeline",
    "Plan": "plans.plan",
    "Profile": "profile.profile",
    "Timeline": "timeline",
    "Workload": "workload",
    "calibrated": "calibration.kept",
    "capture": "graph.capture",
    "compare": "solve",
    "estimate": "profile.estimate",
    "explain": "solve",
    "export": "checkpoint.export",
    "load_cluster": "files",
    "load_plan": "files",
    "load_profile": "files",
    "load_state_dict": "checkpoint",
    "measure": "profile.measure",
    "measure_workload": "runtime.measurement.workload",
    "pad_to_bucket": "data.padding",
    "plan": "solve",
    "read_profile": "files.pipedream",
    "run": "launch",
    "save_cluster": "files",
    "save_plan": "files",
    "save_profile": "files",
    "simulate": "solve",
    "train": "training",
    "train_async": "training",
    "verify": "verification",
}
"""Public name -> the module that defines it."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anabranch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
