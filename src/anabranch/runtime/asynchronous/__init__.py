"""Training without a flush: mini-batches follow each other, and stages read older weights.

pipeline              what the user holds
stream                execution of the asynchronous schedule: passes, updates and totals of a stage
versions              versions of a stage's weights, and its optimizer
requirements          plans and policies that can be trained so, and the policy to take
prediction            weights as they will be
"""
