"""The calibration of this machine in the user's cache, and clusters of local ranks that use it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from anabranch.calibration.machine import OtherLoad, difference, this_machine
from anabranch.cluster import BUSY, CALIBRATION_VERSION, Calibration, Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_cluster, save_cluster
from anabranch.files.cache_folder import cache_folder

COMMAND = "anabranch cluster --calibrate"


def cache_file() -> Path:
    return cache_folder() / "calibration.json"


def keep(measured: Cluster) -> Path:
    """Keep the calibration of this machine for ``local:N``; FileFormatError if that fails."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"{file.parent} cannot be made: {error.strerror}") from error
    save_cluster(measured, file)
    return file


def calibrated(cluster: Cluster) -> tuple[Cluster, str]:
    """Give a cluster of local ranks the kept calibration.

    Args:
        cluster: any; one that is not of local ranks, or has a calibration, is returned as it is.

    Returns:
        The cluster, and a sentence on its calibration, or on the reason why it has none; empty for
        clusters that need none.
    """
    if not is_local(cluster):
        calibration = cluster.calibration
        if calibration is None or not (doubt := _doubt(calibration)):
            return cluster, "" if calibration is None else calibration.remark
        return cluster, (
            f"the calibration of {cluster.name} {doubt}, so predictions for this machine are off; "
            "calibrate it again, and plan anew"
        )
    file = cache_file()
    if not file.is_file():
        return cluster, (
            f"{cluster.name} is not calibrated, so predictions leave out what ranks cost each "
            f"other; {COMMAND} measures that once"
        )
    try:
        measured = load_cluster(file)
    except FileFormatError as error:
        return cluster, f"the calibration is not used: {error}; {COMMAND} makes a new one"
    calibration = measured.calibration
    if calibration is None:
        return cluster, f"{file} has no calibration, so none is used; {COMMAND} makes one"
    if doubt := _doubt(calibration):
        return cluster, f"the calibration {doubt}, so it is not used; {COMMAND} makes a new one"
    links = replace(measured.levels[0], size=cluster.num_devices)
    sentence = f"{cluster.name} as calibrated on {calibration.date}"
    if calibration.remark:
        sentence += f"; {calibration.remark}"
    return replace(cluster, levels=(links,), calibration=calibration), sentence


def is_calibrated(cluster: Cluster) -> bool:
    """Return whether this machine has a calibration for a cluster of local ranks."""
    return calibrated(cluster)[0].calibration is not None


def is_local(cluster: Cluster) -> bool:
    """Return whether a cluster is the preset of ranks here, without a calibration."""
    is_preset = cluster.name.startswith("local:") and len(cluster.levels) == 1
    return is_preset and cluster.calibration is None


MOST_TO_A_CORE = 2
"""Ranks that share a core at most in ``benchmarks/prediction``."""


def remarks(cluster: Cluster, seconds: float = 0.1) -> list[str]:
    """Return sentences on what makes predictions for local ranks rough: ranks that share cores, and
    other processes that compute on this machine now, which are watched for ``seconds``.
    """
    if not cluster.name.startswith("local:"):
        return []
    sentences = []
    if cores := cluster.shared_cores:
        is_compared = cluster.num_devices <= MOST_TO_A_CORE * cores
        how = "a third more or less" if is_compared else "many times as long as predicted"
        sentences.append(
            f"{cluster.num_devices} ranks take turns on {cores} cores: steps may take {how}"
        )
    if cluster.calibration is not None:
        load = OtherLoad()
        time.sleep(seconds)
        if (busy := load.cores()) > BUSY * cluster.calibration.machine.cores:
            sentences.append(
                f"others keep {busy:.1f} of the {cluster.calibration.machine.cores} cores busy at "
                "the moment: meanwhile steps take longer"
            )
    return sentences


def _doubt(calibration: Calibration) -> str:
    """Return the reason why a calibration does not hold here, after its name; empty if it does."""
    if calibration.version != CALIBRATION_VERSION:
        return f"of {calibration.date} was measured in another way than anabranch does now"
    if wrong := difference(calibration.machine, this_machine()):
        return f"of {calibration.date} is of another machine ({wrong})"
    return ""
