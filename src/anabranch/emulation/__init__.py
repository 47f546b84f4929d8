"""Emulated devices: a plan runs on ranks of this machine as if they were the plan's devices.

Compute becomes a wait of its profiled length, links get the cluster's bandwidths and latencies, and
everything else is the real runtime::

    emulation = Emulation(plan, profile, cluster)       before the ranks are forked
    pipe = EmulatedPipeline(emulation, time_scale=4.0)  on each rank, under launch.run
    seconds = pipe.step(record=True)                    the same on every rank, in the devices' time
    pipe.timeline, pipe.late_s

``rehearse(plan, profile)`` of ``rehearsal`` does all of this in one call. It needs no model, only
plan and profile: nothing reads the content of a message, so a value is just a number of bytes. An
emulated rank has no parameters, no loss and no optimizer.

rehearsal     a run of some steps: what ``anabranch rehearse`` does
emulation     plan, prices, order of messages and shared memory, made before the ranks are forked;
              stages without content, with messages of the right size
pipeline      one rank, and its messages, which take as long as on the cluster or on this machine
clock         the time of a device, whatever the host is doing
shared_links  memory that all ranks share, with arrivals of messages and busy times of links
compute       passes and sums of gradients that only take their time

Prices are the simulator's (``simulator.costs``), so a predicted and an emulated step differ by the
work of the runtime, not by the costs of links.
"""

from anabranch.emulation.emulation import Emulation as Emulation
from anabranch.emulation.pipeline import EmulatedPipeline as EmulatedPipeline
