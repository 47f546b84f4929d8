"""Models as graphs of operators, and their cutting into stages.

``capture`` leads from a module to a program (``export``, ``lowering``) and to operators (``group``,
``opgraph_builder``, ``opgraph``); ``split`` cuts the program into stages.
"""
