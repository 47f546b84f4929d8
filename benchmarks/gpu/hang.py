"""Does a step of 1F1B over NCCL with two ranks hang: its first one with kernels that are loaded
when they are first used, with all of them loaded and run before, and compiled?

On one card the ranks pretend to be two hosts (``NCCL_HOSTID``), between which NCCL goes through the
network of the machine. A case that hangs is killed, and says so; one that does not says how long
its first step took, and a later one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

import anabranch
from anabranch.runtime.ranks import mesh
from anabranch.verification import even_plan
from benchmarks.gpu import subject
from benchmarks.gpu.case import Case, Row, first_gpu

CASES = ("lazy", "warmed", "compiled")
LIMIT_S = 40.0


def shared_card() -> dict[str, str]:
    """The environment of ranks on one card. Few blocks per kernel: one that waits must leave room
    for the one that it waits for; and messages through sockets of this host alone.
    """
    return first_gpu() | {"NCCL_MAX_CTAS": "2", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def pretend_two_hosts() -> None:
    """Have NCCL, and the choice of a backend, take ranks on one card for ranks with their own."""
    if torch.cuda.device_count() < 2:
        os.environ["NCCL_HOSTID"] = f"host{os.environ.get('RANK', '0')}"
        mesh.choose_backend = lambda digests: "nccl"


def cases(device: str) -> list[Case]:
    """Two ranks each; in a rehearsal over Gloo."""
    shared = shared_card() if device == "cuda" and torch.cuda.device_count() < 2 else {}
    loading = {"lazy": "LAZY", "warmed": "EAGER", "compiled": "LAZY"}
    return [
        Case(
            name,
            ranks=2,
            limit_s=LIMIT_S,
            environment={**shared, "CUDA_MODULE_LOADING": loading[name]},
        )
        for name in CASES
    ]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """Two steps of 1F1B, of which the first one may hang."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        pretend_two_hosts()
    workload = subject.workload_on(device, device.type)
    captured = anabranch.capture(workload.module, workload.example)
    data = subject.batches(workload)
    if case == "warmed":
        _warm_up(device)
    backend = True if is_gpu else "aot_eager"
    pipeline = anabranch.Pipeline(
        workload,
        even_plan(captured.graph, 2, subject.BATCH),
        captured=captured,
        check_gradients=False,
        compute=anabranch.ComputeOptions(compile=backend if case == "compiled" else False),
        timeout=LIMIT_S / 2,
    )
    yield {"reached": "the first step"}
    seconds = []
    for batch in data[:2]:
        begun = time.perf_counter()
        pipeline.step(batch)
        seconds.append(time.perf_counter() - begun)
    transport = type(pipeline._session.transport).__name__
    yield {"hangs": False, "first_s": seconds[0], "step_s": seconds[1], "transport": transport}
    pipeline.close()


def _warm_up(device: torch.device) -> None:
    """Run every kernel of the model once, with nothing else on the device."""
    workload = subject.workload_on(device, device.type)
    for batch in subject.batches(workload, 1):
        parts = {name: leaf[: subject.MICROBATCH].to(device) for name, leaf in batch.items()}
        loss = workload.module(**parts)["loss"]
        loss.backward()
    workload.make_optimizer(list(workload.module.named_parameters())).step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
