"""Training from the command line: settings of a run, checks, plan, execution and results."""
