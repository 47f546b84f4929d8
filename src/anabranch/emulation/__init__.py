"""Emulated devices: a plan runs on ranks of this machine as if they were the devices it is for.

Compute becomes a wait of its profiled length, links get the cluster's bandwidths and latencies, and
all else is the runtime's own::

    emulation = Emulation(plan, profile, cluster)       before the ranks are forked
    pipe = EmulatedPipeline(emulation, time_scale=4.0)  on each rank, under launch.run
    seconds = pipe.step(record=True)                    the same on every rank, in the devices' time
    pipe.timeline, pipe.late_s

``rehearse(plan, profile)`` of ``rehearsal`` does all of this in one call. No model is needed, only
plan and profile: nothing reads the content of a message, so a value is that many bytes. An emulated
rank has no parameters, no loss and no optimizer.

rehearsal     a run of some steps: what ``anabranch rehearse`` does
emulation     plan, prices, order of messages and shared memory, made before the ranks are forked;
              stages without content, with messages of the right size
pipeline      one rank, and its messages, which take as long as on the cluster or on this machine
clock         the time of a device, whatever the host is doing
shared_links  memory that all ranks share: when messages arrive, until when links are busy
compute       passes and sums of gradients that take as long as they would

Prices are the simulator's (``simulator.costs``), so what differs between a prediction and an
emulated step is what the runtime does, not what a link costs.
"""

from anabranch.emulation.emulation import Emulation
from anabranch.emulation.pipeline import EmulatedPipeline

__all__ = ["EmulatedPipeline", "Emulation"]
