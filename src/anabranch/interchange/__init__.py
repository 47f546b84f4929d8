"""Chain plans in PyTorch's forms: stages as modules, schedules for its pipelining, torchtitan."""
