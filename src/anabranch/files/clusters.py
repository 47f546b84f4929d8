"""Cluster files: levels of devices and the links at each level."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anabranch.cluster import Cluster
from anabranch.files.jsonfile import (
    LIMITS,
    FilePath,
    Seconds,
    Strict,
    Text,
    build,
    document_fields,
    from_document,
    read_document,
    save,
)

CLUSTER = "anabranch.cluster/1"


def save_cluster(cluster: Cluster, path: FilePath) -> None:
    """Write a cluster file; raises FileFormatError if that fails or it could not be read again."""
    save(path, ClusterFile, cluster_to_dict(cluster))


def load_cluster(text: FilePath) -> Cluster:
    """Return a cluster by name, such as ``summit:8x4``, or from a cluster file.

    Raises:
        FileFormatError: naming file, key and value.
        ValueError: if the text is neither a file nor the name of a preset; the message lists them.
    """
    path = Path(text)
    looks_like_a_file = path.suffix == ".json" or os.sep in os.fspath(text)
    if isinstance(text, str) and not looks_like_a_file and not os.path.exists(text):
        return Cluster.preset(text)
    return build(path, to_cluster, read_document(path, CLUSTER, ClusterFile))


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the document that ``save_cluster`` writes."""
    return document_fields(cluster, ClusterFile, schema_=CLUSTER)


class _LevelEntry(Strict):
    brief = ("cards",)

    name: Text
    size: Annotated[int, Field(ge=1, le=LIMITS.devices)]
    bandwidth: Annotated[float, Field(alias="bandwidth_bytes_per_s", gt=0, le=1e18)]
    latency_s: Seconds
    cards: Annotated[int, Field(ge=1, le=LIMITS.devices)] = 1


class _MachineEntry(Strict):
    processor: Text
    cores: Annotated[int, Field(ge=1, le=LIMITS.devices)]
    torch: Text


class _CalibrationEntry(Strict):
    machine: _MachineEntry
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    slowdown: Annotated[
        list[Annotated[float, Field(ge=1, le=1e6)]], Field(min_length=1, max_length=10**4)
    ]
    message_s: Seconds
    pass_s: Seconds
    step_s: Seconds
    all_reduce_byte_s: Seconds
    memory_bandwidth: Annotated[float, Field(alias="memory_bytes_per_s", gt=0, le=1e18)]
    lost_share: Annotated[float, Field(ge=0)] = 0.0
    version: Annotated[int, Field(ge=1, le=10**4)] = 1


class ClusterFile(Strict):
    """The document of a cluster file; a plan file contains one too."""

    schema_: Literal["anabranch.cluster/1"] = Field(alias="schema")
    name: Text
    device: Text
    memory_bytes: Annotated[int, Field(ge=1, le=LIMITS.size)]
    cores: Annotated[int, Field(ge=0, le=LIMITS.devices)] = 0
    levels: Annotated[list[_LevelEntry], Field(min_length=1, max_length=100)]
    calibration: _CalibrationEntry | None = None


def to_cluster(file: ClusterFile) -> Cluster:
    """Return the cluster of a document; ValueError for more devices than any cluster has."""
    devices = math.prod(level.size for level in file.levels)
    if devices > LIMITS.devices:
        raise ValueError(
            f"levels multiply to {devices} devices; at most {LIMITS.devices} are allowed"
        )
    return from_document(Cluster, file)
