"""Auto: one search over stage graphs, judged by the simulator.

``draft`` is the state of the search, ``evaluator`` says what a draft takes.
"""
