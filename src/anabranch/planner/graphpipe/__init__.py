"""GraphPipe's planner as published: stages that form a graph, so that branches run side by side.

"GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
sections 3 to 6 and appendix A.

- ``partitioner``: Algorithm 1, the bisection and the dynamic programme, line by line.
- ``schedules``: Algorithm 2, configurations, time per sample and memory of single stages.
- ``chains``: the series-parallel decomposition.
- ``planner``: the sweep over micro-batch sizes (A.2), and stage graphs of its stages.

Where the paper is silent or leaves a choice, we decided:

- A graph that is not series-parallel has some order added (``graph.series_parallel``); the paper
  converts it to an identical one that is, and does not say how.
- Time per sample has the transfers over the border of a stage and its all-reduce, spread over the
  micro-batches (``toolkit.prices``).
- Where the devices of a stage are: all ways of ``toolkit.place`` are proposed.
- Where nothing fits on powers of two of replicas, any number of them and recomputation may be
  used, and at last stages that are runs of the model in one order; the paper has none of these.
- Large models and clusters are made coarser (``planner.ITEMS``).
"""
