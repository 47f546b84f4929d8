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
    from anabranch.data.length_buckets import pad_to_bucket as pad_to_bucket
    from anabranch.errors import AnabranchError as AnabranchError
    from anabranch.files import load_cluster as load_cluster
    from anabranch.files import load_plan as load_plan
    from anabranch.files import load_profile as load_profile
    from anabranch.files import save_cluster as save_cluster
    from anabranch.files import save_plan as save_plan
    from anabranch.files import save_profile as save_profile
    from anabranch.files.pipedream import read_profile as read_profile
    from anabranch.graph.capture import capture as capture
    from anabranch.interchange.pipelining import TorchPipeline as TorchPipeline
    from anabranch.launch import run as run
    from anabranch.multimodal import multimodal_batch as multimodal_batch
    from anabranch.plans.plan import Plan as Plan
    from anabranch.profile.estimate import estimate as estimate
    from anabranch.profile.measure import measure as measure
    from anabranch.profile.profile import Profile as Profile
    from anabranch.runtime.asynchronous.pipeline import AsyncPipeline as AsyncPipeline
    from anabranch.runtime.compute.options import ComputeOptions as ComputeOptions
    from anabranch.runtime.measurement.workload import measure_workload as measure_workload
    from anabranch.runtime.pipeline import Pipeline as Pipeline
    from anabranch.runtime.state.muon import MuonAdam as MuonAdam
    from anabranch.solve import compare as compare
    from anabranch.solve import explain as explain
    from anabranch.solve import plan as plan
    from anabranch.solve import simulate as simulate
    from anabranch.timeline import Timeline as Timeline
    from anabranch.training import train as train
    from anabranch.training import train_async as train_async
    from anabranch.verification import verify as verify
    from anabranch.workload import Workload as Workload

_NAMES = {
    "calibration.kept": "calibrated",
    "checkpoint": "load_state_dict",
    "checkpoint.export": "export",
    "cluster": "Cluster",
    "data.columns": "Columns",
    "data.length_buckets": "pad_to_bucket",
    "errors": "AnabranchError",
    "files": "load_cluster load_plan load_profile save_cluster save_plan save_profile",
    "files.pipedream": "read_profile",
    "graph.capture": "capture",
    "interchange.pipelining": "TorchPipeline",
    "launch": "run",
    "multimodal": "multimodal_batch",
    "plans.plan": "Plan",
    "profile.estimate": "estimate",
    "profile.measure": "measure",
    "profile.profile": "Profile",
    "runtime.asynchronous.pipeline": "AsyncPipeline",
    "runtime.compute.options": "ComputeOptions",
    "runtime.measurement.workload": "measure_workload",
    "runtime.pipeline": "Pipeline",
    "runtime.state.muon": "MuonAdam",
    "solve": "compare explain plan simulate",
    "timeline": "Timeline",
    "training": "train train_async",
    "verification": "verify",
    "workload": "Workload",
}
"""Module -> the public names that it defines."""

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anabranch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
