"""Piper: a chain of stages, each with its own replicas and recomputation.

After Tarnawski, Narayanan and Phanishayee, "Piper: Multidimensional Planner for DNN
Parallelization" (NeurIPS 2021). A stage is any convex set of operators: the difference of two
nested downsets, of which the plan is a chain::

    {}  <  D1  <  D2  <  all            stage 0 = D1, stage 1 = D2 - D1, stage 2 = all - D2

    best(D, k, s) = min over D' > D, replicas d, recomputation r of
                    max( load(D' - D, d, r), best(D', k - d, s - 1) )
                    as long as the stage D' - D fits with min(s, M) micro-batches in flight

for s stages behind D on k devices. Only the largest load counts, not the depth of the pipeline.

prices      the load of a stage, and the micro-batches that it can keep in flight
search      the recurrence, as passes over the stages that a plan may have
planner     micro-batch sizes, devices for the stages, and the error when nothing fits

Axes of arrays: lo and hi, the downsets before and after a stage, by index; pair, a nested pair of
them; option, a pair with a mode.

Differences from the paper, and decisions where it is silent:

- No tensor parallelism: no runtime here has it.
- Recomputation is one choice per stage, not one per layer by a knapsack.
- Every micro-batch is split over the replicas, so a stage with s - 1 stages behind it holds s. The
  paper's replicas take whole micro-batches in turn.
- Every power of two is planned as micro-batch size. The paper takes it as given.
- There is an edge i -> i + 1 for every i, also where no value flows, because in-flight counts
  follow the line. Values go straight to the stages that read them.
- Replicas are powers of two (``any_degree`` lifts that); a replica's devices lie in one node.
- Of plans with the same load, first those whose stages are runs of the operators in one order,
  branch after branch; then those with the fewest stages.
- Two plans of the least load are proposed where there are two: the fewest stages, whose idle
  devices then go to the slowest of them, and the fewest that take all devices.
"""
