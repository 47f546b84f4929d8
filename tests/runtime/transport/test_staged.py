"""Messages of a GPU through the host, with copies that are late."""

from __future__ import annotations

import pytest
import torch

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport import StagedTransport
from tests.runtime.transport.late_copies import LateCopies
from tests.runtime.transport.local import Hub, LocalTransport
from tests.runtime.transport.runners import receive


def test_what_was_sent_leaves_when_it_is_pushed() -> None:
    """The host may wait elsewhere for a rank that needs the message, and never come back here."""
    hub = Hub(timeout=0.0)
    sender = StagedTransport(LocalTransport(hub, 0), LateCopies())
    receiver = LocalTransport(hub, 1)
    for number in (1.0, 2.0):
        sender.send([torch.tensor([number])], 1, 0)
    with pytest.raises(PeerLostError, match="no message"):
        receive(receiver, torch.empty(1), 0)
    sender.push()
    assert [receive(receiver, torch.empty(1), 0).item() for _ in range(2)] == [1.0, 2.0]


def test_a_rank_that_waits_for_a_message_has_handed_over_its_own() -> None:
    """The other end may need it before it sends."""
    hub = Hub(timeout=0.0)
    ends = [StagedTransport(LocalTransport(hub, rank), LateCopies()) for rank in (0, 1)]
    ends[0].send([torch.tensor([5.0])], 1, 0)
    with pytest.raises(PeerLostError, match="no message"):
        receive(ends[0], torch.empty(1), 1)
    assert receive(ends[1], torch.empty(1), 0).item() == 5.0
