"""Messages between ranks, under two rules that keep every checked schedule free of deadlock.

- Receives are posted ahead of their use; only a receive is ever waited for in line.
- Sends are handed over and never waited for in line: with Gloo a send completes only after its
  receive has been posted, so waiting would turn two ranks that send to each other into a deadlock.

A message is a few tensors. Messages between two ranks with one tag arrive in the order they were
sent. Both ends know shapes and element types beforehand, so nothing but the numbers travels.

base             what every transport does
host             through shared memory, between ranks of one host: memory, meeting
process_group    through torch.distributed (Gloo)
packing          a message as one piece of memory
nccl             between ranks with a GPU each: handshake, notices
"""

from anabranch.runtime.transport.base import Channel as Channel
from anabranch.runtime.transport.base import Receipt as Receipt
from anabranch.runtime.transport.base import Spec as Spec
from anabranch.runtime.transport.base import Transport as Transport
from anabranch.runtime.transport.base import guarded as guarded
from anabranch.runtime.transport.host import HostTransport as HostTransport
from anabranch.runtime.transport.meeting import meet as meet
from anabranch.runtime.transport.nccl import NcclTransport as NcclTransport
from anabranch.runtime.transport.process_group import ProcessGroupTransport as ProcessGroupTransport
