"""Models as graphs of operators, and their cutting into stages.

``capture`` leads from a module to a program (``export``, or ``meta_trace`` on the meta device) and
to operators (``group``, ``opgraph_builder``, ``opgraph``); ``split`` cuts the program into stages.
"""
