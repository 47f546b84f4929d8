"""Documents of every kind of file, and how they are edited and refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from anabranch.errors import FileFormatError
from anabranch.files import load_cluster, load_plan, load_profile

# The folder is the same for all examples of a property; every example overwrites its file.
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


PROFILE: dict[str, Any] = {
    "schema": "anabranch.profile/1",
    "name": "tower",
    "granularity": "layer",
    "device": "cpu",
    "source": "measured",
    "proportional": False,
    "samples": [1, 4],
    "parameters": [{"name": "layer.weight", "nbytes": 400, "trainable": True}],
    "operators": [
        {
            "name": "layer",
            "kind": "Linear",
            "parameters": ["layer.weight"],
            "forward_s": [0.001, 0.002],
            "backward_s": [0.002, 0.004],
            "kept_bytes_per_sample": 40,
        },
        {
            "name": "loss",
            "kind": "",
            "parameters": [],
            "forward_s": [0.0, 0.0],
            "backward_s": [0.0, 0.0],
            "kept_bytes_per_sample": 0,
        },
    ],
    "values": [
        {
            "name": "image",
            "producer": None,
            "consumers": ["layer"],
            "nbytes": 40,
            "batched": True,
            "grad": False,
        },
        {
            "name": "",
            "producer": "layer",
            "consumers": ["loss"],
            "nbytes": 40,
            "batched": True,
            "grad": True,
        },
    ],
}


CLUSTER: dict[str, Any] = {
    "schema": "anabranch.cluster/1",
    "name": "two boxes",
    "device": "v100",
    "memory_bytes": 17179869184,
    "cores": 0,
    "levels": [
        {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45e9, "latency_s": 5e-6},
        {"name": "network", "size": 2, "bandwidth_bytes_per_s": 12.5e9, "latency_s": 1e-5},
    ],
}


# Two branches that meet: 0 -> 2 <- 1, eight samples in micro-batches of two.
PLAN: dict[str, Any] = {
    "schema": "anabranch.plan/1",
    "planner": "graphpipe",
    "model": "two-branch",
    "options": {"preset": "small"},
    "granularity": "layer",
    "device": "cpu",
    "cluster": "local:4",
    "profile": "measured, cpu, at 1, 2 samples",
    "batch_size": 8,
    "schedule": "1f1b",
    "depth": 2,
    "shape": "graph",
    "search_s": 0.25,
    "simulate_s": 0.5,
    "improve_s": 0.0,
    "predicted": {
        "step_s": 0.5,
        "samples_per_s": 16.0,
        "bottleneck_s_per_sample": 0.05,
        "bubble": 0.25,
        "device_peak_bytes": [100, 100, 300, 300],
    },
    "stages": [
        {
            "operators": ["left"],
            "devices": [0],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 2,
            "recompute": False,
            "load": 1.0,
            "backward_factor": 2.0,
            "weight_share": 0.5,
            "message": 0.0,
            "tensor": 1,
        },
        {
            "operators": ["right"],
            "devices": [1],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 2,
            "recompute": True,
            "load": 1.0,
            "backward_factor": 2.0,
            "weight_share": 0.5,
            "message": 0.0,
            "tensor": 1,
        },
        {
            "operators": ["join", "loss"],
            "devices": [2, 3],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 1,
            "recompute": False,
            "load": 1.0,
            "backward_factor": 2.0,
            "weight_share": 0.5,
            "message": 0.0,
            "tensor": 1,
        },
    ],
    "edges": [[0, 2], [1, 2]],
    "notes": [],
}


KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "profile": (PROFILE, load_profile),
    "cluster": (CLUSTER, load_cluster),
    "plan": (PLAN, load_plan),
}


def refusal(path: Path, load: Callable[[Path], object], text: str | bytes) -> str:
    """Write a file that nobody should accept; what the refusal says after the file's name."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path)).removeprefix(":").strip()


def edited(document: dict[str, Any], path: tuple[int | str, ...], value: object) -> str:
    """The document with one entry replaced (or left out: ``...``), as JSON."""
    result = copy.deepcopy(document)
    place: Any = result
    for part in path[:-1]:
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(result)
