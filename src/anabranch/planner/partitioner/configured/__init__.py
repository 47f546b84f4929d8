"""The search with a micro-batch size, and a k of kFkB, for every stage.

candidates              sizes and bounds to try, and the proposals
prices, menu, shapes    configurations of a stage and what they offer
reach, states, share    the dynamic programme over positions and configurations
trace, plans            the stages behind a state, and their stage graphs
"""
