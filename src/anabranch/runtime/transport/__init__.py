"""Messages between ranks, under two rules that keep every checked schedule free of deadlock.

- Receives are posted ahead of their use; only a receive is ever waited for in line.
- Sends are handed over and never waited for in line: with Gloo a send completes only after its
  receive has been posted, so waiting would turn two ranks that send to each other into a deadlock.

A message is a few tensors. Messages between two ranks with one tag arrive in the order they were
sent. Both ends know shapes and element types beforehand, so nothing but the numbers travels.

base             what every transport does
host             through shared memory, between ranks of one host: memory, log, meeting
process_group    through torch.distributed (Gloo)
packing          a message as one piece of memory
nccl             between ranks with a GPU each: handshake, notices, buffers, streams
router           several transports as one
"""

from anabranch.runtime.transport.base import (
    Channel,
    Receipt,
    Router,
    Spec,
    Transport,
    guarded,
    lost,
)
from anabranch.runtime.transport.host import HostTransport
from anabranch.runtime.transport.meeting import Meeting, meet
from anabranch.runtime.transport.nccl import NcclTransport
from anabranch.runtime.transport.process_group import ProcessGroupTransport

__all__ = [
    "Channel",
    "HostTransport",
    "Meeting",
    "NcclTransport",
    "ProcessGroupTransport",
    "Receipt",
    "Router",
    "Spec",
    "Transport",
    "guarded",
    "lost",
    "meet",
]
