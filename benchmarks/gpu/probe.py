"""Calls of the host that wait for a kernel on another stream, which stands for a receive that waits
for its peer: such a call would keep the host from what the peer needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.case import Case, Row

SPIN_S = 2.0

Call = Callable[[], object]


def _used_kernel() -> Call:
    x = torch.ones(1024, device="cuda")
    x.add_(1.0)
    return lambda: x.add_(1.0)


def _new_kernel() -> Call:
    x = torch.full((1024,), 0.5, device="cuda")
    return lambda: x.tanh()


def _matmul() -> Call:
    x = torch.ones(512, 512, device="cuda")
    return lambda: x @ x


def _copy_to_host() -> Call:
    x = torch.ones(1024, device="cuda")
    return lambda: x.cpu()


def _malloc() -> Call:
    return lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def _free() -> Call:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # the allocator keeps it
    return torch.cuda.empty_cache


def _pinned() -> Call:
    return lambda: torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)


CALLS: dict[str, Callable[[], Call]] = {
    "used-kernel": _used_kernel,
    "new-kernel": _new_kernel,
    "matmul": _matmul,
    "copy-to-host": _copy_to_host,
    "malloc": _malloc,
    "free": _free,
    "pinned": _pinned,
}
"""Name -> prepares the call. The first should not wait; the others do something for the first time
or end something.
"""


def cases(device: str) -> list[Case]:
    """Each call in a fresh process, with modules loaded when they are first used and at once."""
    return [
        Case(f"{call} {loading}", limit_s=40.0, environment={"CUDA_MODULE_LOADING": loading})
        for loading in ("LAZY", "EAGER")
        for call in CALLS
    ]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """Seconds of one call while a kernel spins on a stream of its own."""
    side = torch.cuda.Stream(device)

    def spin(cycles: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
        end.record(side)
        return start, end

    call = CALLS[case.split()[0]]()
    cycles = 100_000_000
    for _ in range(2):  # the first one brings the clock up
        start, end = spin(cycles)
        torch.cuda.synchronize()
    start, end = spin(int(cycles * SPIN_S / (start.elapsed_time(end) / 1e3)))
    while not start.query():
        time.sleep(1e-3)
    begun = time.perf_counter()
    call()
    host_s, waited = time.perf_counter() - begun, end.query()
    torch.cuda.synchronize()
    yield {
        "loading": os.environ["CUDA_MODULE_LOADING"],
        "host_s": host_s,
        "spin_s": start.elapsed_time(end) / 1e3,
        "waited": waited,
    }
