"""Profiles, clusters and plans as JSON files.

Pydantic models define the content of files; the core types behind them stay plain dataclasses.
Units are in the keys; operators go by name, so people can edit files:

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

Each kind of file has a module; ``jsonfile`` has what they share. Keys added later have defaults.
"""

from anabranch.files.clusters import cluster_to_dict as cluster_to_dict
from anabranch.files.clusters import load_cluster as load_cluster
from anabranch.files.clusters import save_cluster as save_cluster
from anabranch.files.plans import load_plan as load_plan
from anabranch.files.plans import plan_from_dict as plan_from_dict
from anabranch.files.plans import plan_to_dict as plan_to_dict
from anabranch.files.plans import save_plan as save_plan
from anabranch.files.profiles import load_profile as load_profile
from anabranch.files.profiles import save_profile as save_profile
