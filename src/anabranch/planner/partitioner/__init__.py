"""The search of ``graphpipe`` and ``sequential``, from the model to candidates.

chains             the model as the search sees it: with its branches, or in a row
range_prices       prices of all runs of operators that a stage may be
block_stage        stages that take a part of the branches of a block beside them
branch_shares      which part leaves least to place: a knapsack over the branches
chain_programme    fewest devices under bounds on the period: a dynamic programme
programme_tables   its tables, and the stages that can be read from them
period_bounds      which of many bounds suffice
period_search      micro-batch sizes, bounds and depths to try
exact              the search over all partitions of graphs with few downsets
polish, chain_cut  what lies near a plan
limits             tuned numbers
"""
