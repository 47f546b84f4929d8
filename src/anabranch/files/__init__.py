"""Profiles, clusters and plans as JSON files.

What a reader may believe about a file is written down as pydantic models; the core types behind
them stay plain dataclasses. Units are in the keys; operators go by name, so people can edit files:

    {
      "schema": "anabranch.cluster/1",
      "name": "two boxes",
      "device": "v100",
      "memory_bytes": 17179869184,
      "cores": 0,
      "levels": [
        {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45000000000.0, "latency_s": 5e-06},
        {"name": "network", "size": 2, "bandwidth_bytes_per_s": 12500000000.0, "latency_s": 1e-05}
      ]
    }

One module for each kind of file; ``jsonfile`` has what all need. Later keys have defaults.
"""

from __future__ import annotations

from anabranch.files.clusters import CLUSTER, cluster_to_dict, load_cluster, save_cluster
from anabranch.files.jsonfile import LIMITS
from anabranch.files.plans import PLAN, load_plan, plan_from_dict, plan_to_dict, save_plan
from anabranch.files.profiles import PROFILE, load_profile, profile_to_dict, save_profile

__all__ = [
    "CLUSTER",
    "LIMITS",
    "PLAN",
    "PROFILE",
    "cluster_to_dict",
    "load_cluster",
    "load_plan",
    "load_profile",
    "plan_from_dict",
    "plan_to_dict",
    "profile_to_dict",
    "save_cluster",
    "save_plan",
    "save_profile",
]
