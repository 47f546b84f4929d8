"""Training of a plan on real devices: one process (rank) per device, each with its own stages.

pipeline        what the user holds: steps with a flush, evaluation, checkpoints
session         one rank's share of a run, which both pipelines hold, and held-out means
worker, messages
                the actions of one device in order; the tensors of its messages
assignment, first_batch
                what ranks compare before anything is made; what they check with the first batch
worker_cache, plan_parts
                workers by batch size; the plan's stages as parts of the captured model
data_feed, step_totals
                batches; loss and metrics over all ranks
reference       the user's own module in one process, with which plans are compared

asynchronous    training without a flush: versions of weights, predictions, replicas in turn
compute         one micro-batch of one stage, between two messages, and its options:
                precision, compilation, offloading, random numbers
data_parallel   gradients summed over whoever holds a parameter, in buckets, while backwards go on;
                then the update
guards          ranks that differ or lack memory do not start, wrong gradients and failures are
                reported where they arise, and an interrupt ends all ranks at one step
measurement     what a step took: a timeline of all ranks, and the peak memory
numerics        mixed precision, random numbers by sample, numbers that are not finite,
                activations kept on the host
ranks           the mesh of ranks and its process groups, their devices, starts and restarts
state           parameters, buffers and optimizer; checkpoints, and copies that outlive a rank
transport       tensors between ranks: shared memory, Gloo, NCCL, and GPUs through the host

Whatever waits for another rank raises ``PeerLostError`` when that one is gone.
"""
