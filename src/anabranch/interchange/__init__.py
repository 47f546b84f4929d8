"""Chain plans in PyTorch's own forms: stages as plain modules, schedules for its pipelining, names
for torchtitan.
"""
