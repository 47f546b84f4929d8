"""The evaluator's compiled part, from a draft to the seconds of a step.

    layout        stages in topological order, their devices, edges
    stage_bytes   what they hold and send
    in_flight     their warm-up, and whether it fits
    slices        what their devices compute at a time
    messages      what is sent when, on which ``ports``
    all_reduces   what is summed, and by whom
    updates       when gradients are final, what the optimizer takes
    clock         all of it in time; ``tournament`` has the next event
    step          these one after the other

Only ``evaluator`` imports from here, and only when it is made: numba is loaded then.
"""
