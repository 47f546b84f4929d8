"""Plans from all partitions of a graph, where it has few downsets or can be made to have few.

candidates        which graphs are searched so, and the proposals
atoms, lattice    what is indivisible, and the partitions as chains of layers
prices, reach     what a layer costs; the least period of all partitions
paths, search     short ways and few samples in flight; the candidates of one micro-batch size
"""
