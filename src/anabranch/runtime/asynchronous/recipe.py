"""Which optimizer does a workload's recipe make? Asked of it with stand-ins for the parameters.

A recipe may look at names, dimensions and types of parameters, to have groups with and without
decay, so the stand-ins have those, in a few bytes each. The parameters themselves need not exist
(planning builds models without memory for them), and are left alone.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from anabranch.runtime.asynchronous.prediction import facts_of
from anabranch.weights import OptimizerFacts
from anabranch.workload import Workload


def optimizer_of(workload: Workload) -> OptimizerFacts | None:
    """What policies have to know of the workload's optimizer.

    Returns:
        The facts; None where nothing is trained, or the recipe does not take the stand-ins.
    """
    stand_ins = [
        (name, nn.Parameter(torch.zeros([1] * p.dim(), dtype=p.dtype)))
        for name, p in workload.module.named_parameters()
        if p.requires_grad
    ]
    if not stand_ins:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever trains will see them
            return facts_of(workload.optimizer(stand_ins))
    except Exception:  # the user's own code, written for other parameters; training will say why
        return None
