"""What ``graphpipe`` and ``sequential`` search with, from prices to proposals.

prices    what a stage on d replicas costs: its period, and whether it fits
rows, ranges, parts      tables of those prices for all stages that a plan may have
chains, line             the model as the search sees it: with its branches, or in a row
reach, sharing, solved   the dynamic programme: fewest devices under a bound on the period
exact                    the search over all partitions of graphs with few downsets
search                   micro-batch sizes, bounds and depths to try
assemble, place          devices for the stages: how many, and which
estimate                 the rank of a proposal
polish, chain_cut        what lies near a plan
"""
