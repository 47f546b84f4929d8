"""Training without a flush: mini-batches follow each other, and stages read older weights.

pipeline              what the user holds
stream                the endless 1F1B of one rank, with ``versions`` of its stage's weights
round_robin           replicas that take whole mini-batches in turn; ``round_robin_stream`` is their
                      order
requirements          plans and policies that can be trained so, and the policy to take
prediction            weights as they will be
minibatch_totals      loss and metrics of mini-batches, begun in one order on all ranks
divergence, recording a loss that climbs; a measured timeline
"""
