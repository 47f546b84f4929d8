"""DAPPLE (Fan et al., PPoPP 2021): hybrids of data and pipeline parallelism by synchronous latency.

The planner minimises L, the seconds of one synchronous step as the paper prices it, over where the
model is cut, how many replicas every stage has (any number) and on which machines they are.

objective   L and its pivot stage
links       what a hop costs, by devices per machine
placement   the three policies: fresh, append and scatter first
tables      what every run of operators costs
search      the recursion, compiled
planner     micro-batch sizes, and stage graphs of what was found

Axes of arrays: degree, a place among the numbers of replicas; i and j, the run [i, j) of operators
in their order; cut, the operators before it; step, a way to add a stage; machine.

Decisions where the paper leaves a choice:

- Every power of two that the profile covers is tried as micro-batch size, except those that cannot
  come near the best.
- Every stage must fit with min(S - i, M) micro-batches in flight (policy PA), no recomputation.
- The model is put in one order, branch after branch, and what a stage reads from any stage before
  it is priced as one transfer from the stage just before.
- Replicas hold whole samples, and the fullest one counts: 32 samples on 15 devices are 3.
"""
