"""Models as graphs of operators, and their cutting into stages.

``capture`` leads from a module to a program, and from there to operators.

tracing         export of the user's forward, and its lowering to a flat program
samples         dependence of values on the samples of a batch: what micro-batches may change
group, opgraph_builder, opgraph
                operators, the units that planners place, and the values between them
rewrites        programs with more branches and the same results
cutting         programs of the stages of a plan
"""
