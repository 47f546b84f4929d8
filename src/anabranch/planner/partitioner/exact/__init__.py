"""Plans from all partitions of a graph, where it has few downsets or can be made to have few.

candidates            which graphs are searched so, and the proposals
contraction, lattice  what is indivisible, and the partitions as chains of layers
prices                what a layer costs
partition_programme   the least period of all partitions: a dynamic programme
paths                 short ways and few samples in flight
size_candidates       the candidates of one micro-batch size
"""
