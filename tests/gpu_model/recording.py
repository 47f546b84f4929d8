"""What each rank of a real run calls, in its order: messages, computations, sums, looks.

The runtime trains on the CPU. Methods through which everything passes that concerns a device or
another rank are wrapped, and note what was called. What a run does on GPUs differs in nothing but
what a transport and a sum do inside.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.compute.stage_compute import StageCompute
from anabranch.runtime.data_parallel.updates import Updates
from anabranch.runtime.ranks.collectives import Pending
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.transport import Receipt, Spec, Transport

Event = tuple[Any, ...]
_OWN_USES = 1


class Recorder:
    """Events of this process; see ``programs`` for what they are."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = count()
        self._held: dict[int, list[torch.UntypedStorage]] = {}
        self._depth = 0

    def begin(self, part: str) -> None:
        """Begin another part."""
        self.note("part", part)

    def note(self, *event: Any) -> None:
        """Add an event, behind the ends of messages that nobody holds any more."""
        uses = torch._C._storage_Use_Count
        for number, storages in list(self._held.items()):
            if all(uses(storage._cdata) == _OWN_USES for storage in storages):
                del self._held[number]
                self.events.append(("drop", number))
        self.events.append(event)

    def hold(self, number: int, tensors: Sequence[Tensor]) -> None:
        self._held[number] = [tensor.untyped_storage() for tensor in tensors]

    def install(self) -> None:
        """Wrap what a rank of this process will call."""
        make = Mesh.transport

        def transport(mesh: Mesh, *args: Any) -> Transport | None:
            made = make(mesh, *args)
            return made if made is None or not args[1:] else _Recorded(made, self)

        self._set(Mesh, "transport", transport)
        for name in ("start_all_reduce", "start_reduce", "start_all_gather", "start_broadcast"):
            self._set(Mesh, name, self._starting(getattr(Mesh, name), name))
        for name in ("broadcast", "gather_bytes"):
            self._set(Mesh, name, self._blocking(getattr(Mesh, name), name))
        begin = Mesh.begin_sums

        def begin_sums(mesh: Mesh) -> None:
            self.note("begin sums")
            begin(mesh)

        self._set(Mesh, "begin_sums", begin_sums)
        for kind, names in (
            (StageCompute, ("forward", "backward", "weight_gradients")),
            (Updates, ("apply", "apply_guarded")),
            (VersionedWeights, ("update",)),
        ):
            for name in names:
                self._set(kind, name, self._computing(getattr(kind, name), name))
        for module in list(sys.modules.values()):
            if module.__name__.startswith("anabranch.runtime") and hasattr(module, "fetched"):
                self._set(module, "fetched", self._looking(module.fetched))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)

    def _inside(self, call: Callable[[], Any]) -> Any:
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1

    def _starting(self, start: Callable[..., Pending], name: str) -> Callable[..., Any]:
        def starting(mesh: Mesh, tensor: Tensor, *args: Any) -> Any:
            ranks = next((arg for arg in args if isinstance(arg, tuple)), None)
            if self._depth or mesh.size == 1 or (ranks is not None and len(ranks) == 1):
                return start(mesh, tensor, *args)
            number = next(self._numbers)
            self.note("start", number, ranks, name)
            return _Awaited(self._inside(lambda: start(mesh, tensor, *args)), number, self)

        return starting

    def _blocking(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def blocking(mesh: Mesh, tensor: Tensor, *args: Any) -> Any:
            ranks = next((arg for arg in args if isinstance(arg, tuple)), None)
            if self._depth or mesh.size == 1 or (ranks is not None and len(ranks) == 1):
                return call(mesh, tensor, *args)
            number = next(self._numbers)
            self.note("start", number, ranks, name)
            self.note("finish", number)
            return self._inside(lambda: call(mesh, tensor, *args))

        return blocking

    def _computing(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def computing(*args: Any, **options: Any) -> Any:
            self.note("compute", name)
            return call(*args, **options)

        return computing

    def _looking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def looking(numbers: Any) -> Any:
            if numbers:
                self.note("look")
            return call(numbers)

        return looking


class _Recorded:
    """A transport that notes what it is asked for."""

    def __init__(self, inner: Transport, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        self._recorder.note("send", rank, tag)
        self._inner.send(tensors, rank, tag)

    def receive(self, specs: Sequence[Spec], device: torch.device, rank: int, tag: int) -> Receipt:
        number = next(self._recorder._numbers)
        self._recorder.note("receive", number, rank, tag)
        return _RecordedReceipt(
            self._inner.receive(specs, device, rank, tag), number, self._recorder
        )

    def settle(self) -> None:
        self._recorder.note("settle")
        self._inner.settle()

    def flush(self) -> None:
        self._recorder.note("flush")
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


class _RecordedReceipt:
    def __init__(self, inner: Receipt, number: int, recorder: Recorder) -> None:
        self._inner, self._number, self._recorder = inner, number, recorder

    def wait(self) -> list[Tensor]:
        self._recorder.note("take", self._number)
        tensors = self._inner.wait()
        self._recorder.hold(self._number, tensors)
        return tensors


class _Awaited:
    """A collective that notes where it is waited for."""

    def __init__(self, inner: Pending, number: int, recorder: Recorder) -> None:
        self._inner, self._number, self._recorder = inner, number, recorder
        self._is_finished = False

    def wait(self) -> Tensor:
        if not self._is_finished:
            self._is_finished = True
            self._recorder.note("finish", self._number)
        return self._inner.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def programs(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Cut a rank's events at its ``("part", name)``. Events are

    ``receive`` number, rank, tag; ``take`` number; ``drop`` number; ``send`` rank, tag; ``settle``;
    ``flush``; ``compute`` name; ``start`` number, ranks or None for a sum of the hosts, name;
    ``finish`` number; ``begin sums``; ``look``.
    """
    parts: dict[str, list[Event]] = {}
    part: list[Event] = []
    for event in events:
        if event[0] == "part":
            part = parts.setdefault(event[1], [])
        else:
            part.append(event)
    return parts
