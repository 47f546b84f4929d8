"""The calibration of this machine in the user's cache, and clusters of local ranks that have it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from anabranch.calibration.machine import OtherLoad, difference, this_machine
from anabranch.cluster import BUSY, CALIBRATION_VERSION, Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_cluster, save_cluster
from anabranch.files.cache_folder import cache_folder

COMMAND = "anabranch cluster --calibrate"


def cache_file() -> Path:
    """Where the calibration is kept."""
    return cache_folder() / "calibration.json"


def keep(measured: Cluster) -> Path:
    """Keep what was measured on this machine for ``local:N``; FileFormatError if that fails."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"{file.parent} cannot be made: {error.strerror}") from error
    save_cluster(measured, file)
    return file


def calibrated(cluster: Cluster) -> tuple[Cluster, str]:
    """A cluster of local ranks as the kept calibration has it.

    Args:
        cluster: any; what is not local ranks without a calibration is returned as it is.

    Returns:
        The cluster, and a sentence about its calibration: which one it is, or why it has none;
        empty where the question does not arise.
    """
    if not is_local(cluster):
        remark = cluster.calibration.remark if cluster.calibration is not None else ""
        return cluster, foreign(cluster) or outdated(cluster) or remark
    file = cache_file()
    if not file.exists():
        return cluster, (
            f"{cluster.name} is not calibrated, so predictions leave out what ranks cost each "
            f"other on this machine; {COMMAND} measures that once"
        )
    try:
        kept = load_cluster(file)
    except FileFormatError as error:
        return cluster, f"the calibration is not used: {error}; {COMMAND} makes a new one"
    if kept.calibration is None:
        return cluster, f"{file} has no calibration, so none is used; {COMMAND} makes one"
    if kept.calibration.version != CALIBRATION_VERSION:
        return cluster, (
            f"the calibration of {kept.calibration.date} was measured in another way than "
            f"anabranch does now, so it is not used; {COMMAND} makes a new one"
        )
    if wrong := difference(kept.calibration.machine, this_machine()):
        return cluster, (
            f"the calibration of {kept.calibration.date} is of another machine ({wrong}), so it is "
            f"not used; {COMMAND} makes a new one"
        )
    links = replace(kept.levels[0], size=cluster.num_devices)
    found = replace(cluster, levels=(links,), calibration=kept.calibration)
    said = f"{cluster.name} as calibrated on {kept.calibration.date} ({file})"
    remark = kept.calibration.remark
    return found, f"{said}; {remark}" if remark else said


def load_remark(cluster: Cluster, seconds: float = 0.1) -> str:
    """A sentence where others compute on this machine beside local ranks; a look takes a moment."""
    if cluster.calibration is None or not cluster.name.startswith("local:"):
        return ""
    load = OtherLoad()
    time.sleep(seconds)
    cores = load.cores()
    if cores <= BUSY * cluster.calibration.machine.cores:
        return ""
    return (
        f"others keep {cores:.1f} of the {cluster.calibration.machine.cores} processor cores busy "
        "at the moment; while they do, steps take longer than is predicted"
    )


def is_calibrated(cluster: Cluster) -> bool:
    """Whether there is a calibration of this machine for a cluster of local ranks."""
    return calibrated(cluster)[0].calibration is not None


def is_local(cluster: Cluster) -> bool:
    """Whether it is the preset of ranks on this machine, without a calibration."""
    is_preset = cluster.name.startswith("local:") and len(cluster.levels) == 1
    return is_preset and cluster.calibration is None


def outdated(cluster: Cluster) -> str:
    """A sentence where a cluster was calibrated in another way than it would be now."""
    calibration = cluster.calibration
    if calibration is None or calibration.version == CALIBRATION_VERSION:
        return ""
    return (
        f"{cluster.name} was calibrated on {calibration.date} in another way than anabranch does "
        "now, so predictions are further off; calibrate it again, and plan anew"
    )


def foreign(cluster: Cluster) -> str:
    """A sentence where a cluster of processes was calibrated on another machine than this one."""
    calibration = cluster.calibration
    if calibration is None or not (wrong := difference(calibration.machine, this_machine())):
        return ""
    return (
        f"{cluster.name} was calibrated on {calibration.date} on another machine than this one "
        f"({wrong}); its predictions are for that machine"
    )
