"""Emulated devices: a plan runs on ranks of this machine as if they were the devices it is for.

A user wants to know what a plan does on 32 GPUs before anybody rents them, and 64 ranks have to
run on two cores. So compute becomes a wait of its profiled length, links get the cluster's
bandwidths and latencies, and all else is the runtime's own: schedule, worker, transport, order of
messages::

    emulation = Emulation(plan, profile, cluster)       before the ranks are forked
    pipe = EmulatedPipeline(emulation, time_scale=4.0)  on each rank, under launch.run
    seconds = pipe.step(record=True)                    the same on every rank, in the devices' time
    pipe.timeline, pipe.late_s

``anabranch.rehearsal.rehearse(plan, profile)`` does all of this in one call.

No model is needed, only plan and profile: nothing reads the content of a message, so a value is
that many bytes (``stages``), and plans for profile files of other projects can be rehearsed too. An
emulated rank has no parameters, no loss and no optimizer.

clock     what time it is for a device, whatever the host is doing
board     memory that all ranks share: when messages were sent and arrive, until when links are busy
stages    stages that compute nothing, with messages of the right size
compute   waits as long as a stage computes
links     a transport whose messages take as long as on the cluster
pipeline  one rank

Prices are the simulator's (``simulator.costs``), so what differs between a prediction and an
emulated step is what the runtime does, not what a link costs.
"""

from anabranch.emulation.emulation import Emulation
from anabranch.emulation.pipeline import EmulatedPipeline

__all__ = ["EmulatedPipeline", "Emulation"]
