"""Training without a flush: mini-batches follow each other, and stages read older weights.

pipeline              the user's object, ``AsyncPipeline``
stream                execution of the asynchronous schedule: passes, updates and totals of a stage
versions              versions of a stage's weights, and its optimizer
requirements          plans and policies that can train in this way, and the choice of a policy
prediction            prediction of later weights
corrections           changes of updates against stale gradients
"""
