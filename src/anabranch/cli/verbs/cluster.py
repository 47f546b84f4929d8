"""The verb ``cluster``: what a cluster is, and the calibration of this machine or job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli import torchrun
from anabranch.cli.clusters import read_cluster
from anabranch.cli.output import file_to_write, note, print_json, print_table, say, say_written
from anabranch.cli.progress import progress_bar
from anabranch.cli.spread import spread
from anabranch.cluster import Cluster


@spread
def cluster(
    name: Annotated[str | None, typer.Argument(metavar="CLUSTER")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", callback=file_to_write)] = None,
    no_calibration: Annotated[bool, typer.Option("--no-calibration")] = False,
) -> None:
    """Show a cluster, or measure one.

    What --calibrate finds about this machine is kept, and local:N has it from then on; with
    torchrun it goes to the file of -o only.

    Examples:

    - `anabranch cluster summit:8x4`
    - `anabranch cluster --calibrate`
    - `torchrun --nnodes 4 --nproc-per-node 2 ... -m anabranch cluster --calibrate -o ours.json`

    Args:
        name: Preset such as local:4 or summit:8x4, or a JSON file [default: this machine].
        calibrate: Measure this machine, or under torchrun all hosts of the job: links, processor
            time of messages, how much slower ranks compute side by side, updates.
        output: A cluster file to write.
    """
    if calibrate and (name is not None or no_calibration):
        raise typer.BadParameter("--calibrate measures this machine; leave out the rest but -o")
    if calibrate:
        shown, kept = _calibrated(output)
        if shown is None:
            return
    else:
        default = f"local:{os.cpu_count() or 1}"
        shown, kept = read_cluster(name or default, calibrated=not no_calibration), None
        if output is not None:
            from anabranch.files import save_cluster

            save_cluster(shown, output)
    print_json(_document(shown, output, kept))
    _show(shown)
    say_written(output)
    if kept is not None:
        say(f"local:N is predicted with this from now on; kept in {kept}")


def _calibrated(output: Path | None) -> tuple[Cluster | None, Path | None]:
    """Measure; return the cluster and its file on the first rank, None on others."""
    from anabranch.calibration.measure import calibrate_job
    from anabranch.files import save_cluster

    is_job = torchrun.is_rank()
    if is_job and output is None:
        raise typer.BadParameter("what torchrun's ranks measure is written to a file: add -o FILE")
    with progress_bar("calibrating"):
        measured, kept = (calibrate_job(), None) if is_job else calibrate_and_keep()
    if measured is None:
        return None, None
    if output is not None:
        save_cluster(measured, output)
    if measured.calibration is not None and measured.calibration.remark:
        note(measured.calibration.remark)
    return measured, kept


def calibrate_and_keep() -> tuple[Cluster, Path]:
    """Measure this machine for ``local:N``; return the cluster and the file that keeps it."""
    from anabranch.calibration.kept import keep
    from anabranch.calibration.measure import calibrate

    measured = calibrate()
    return measured, keep(measured)


def is_calibrated(devices: int) -> bool:
    """Return True if this machine has a calibration for so many local ranks."""
    from anabranch.calibration import kept

    return kept.is_calibrated(Cluster.preset(f"local:{devices}"))


def _document(shown: Cluster, output: Path | None, kept: Path | None) -> dict[str, object]:
    from anabranch.files import cluster_to_dict

    calibration = shown.calibration
    return {
        **cluster_to_dict(shown),
        "devices": shown.num_devices,
        "message_s": None if calibration is None else calibration.message_s,
        "slowdown": list(shown.slowdown),
        "remark": "" if calibration is None else calibration.remark,
        "file": output,
        "kept": kept,
    }


def _show(cluster: Cluster) -> None:
    say(
        f"{cluster.name}: {cluster.num_devices} devices ({cluster.device}) with "
        f"{cluster.memory_bytes / 2**30:.1f} GiB each"
    )
    rows = [
        [
            f"level {i}, {level.name}",
            str(level.size),
            f"{level.cards} x " * (level.cards > 1) + f"{level.bandwidth / 1e9:.2f}",
            f"{level.latency_s * 1e6:.1f}",
        ]
        for i, level in enumerate(cluster.levels)
    ]
    print_table("links", ["between", "members", "GB/s", "latency us"], rows)
    if cluster.cores:
        say(f"{cluster.cores} processor cores per {cluster.levels[0].name}, which its ranks share")
    for row in calibration_rows(cluster):
        say(row)


def calibration_rows(cluster: Cluster) -> list[str]:
    """Return lines of text about a calibration; none without one."""
    calibration = cluster.calibration
    if calibration is None:
        return []
    machine, slowdown = calibration.machine, calibration.slowdown
    slower = ", ".join(f"{k}: {slowdown[k - 1]:.2f}x" for k in sorted({1, 2, len(slowdown)}))
    return [
        f"calibrated on {calibration.date}: {machine.processor}, {machine.cores} cores, "
        f"torch {machine.torch}",
        f"ranks that compute side by side take longer: {slower}",
        f"a message takes {calibration.message_s * 1e6:.0f} us at each end",
        f"besides its operators a forward or backward takes {calibration.pass_s * 1e6:.0f} us, a "
        f"step {calibration.step_s * 1e3:.2f} ms",
        f"an all-reduce takes {calibration.all_reduce_byte_s * 2**20 * 1e6:.0f} us per MiB and "
        "other rank",
        f"an update goes through memory at {calibration.memory_bandwidth / 1e9:.1f} GB/s",
    ]
