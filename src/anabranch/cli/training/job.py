"""A model that is about to run on local ranks, with its profile and plan."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.cli import torchrun
from anabranch.cli.clusters import as_calibrated, cluster_to_plan_for
from anabranch.cli.compiling import begin_compiling
from anabranch.cli.parsing import usage
from anabranch.cli.progress import announce, measured
from anabranch.cli.settings import LocalPlanSettings
from anabranch.cli.source import ModelSource
from anabranch.cluster import Cluster
from anabranch.device.kinds import CPU, kind_of
from anabranch.errors import AnabranchError, SearchStoppedError
from anabranch.remembered import remembered

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.workload import Workload


class Job:
    """A model that is about to run: workload, captured graph, measured profile, plan."""

    def __init__(self, source: ModelSource, plan: Plan | None, device: str = "cpu") -> None:
        self.source = source
        self.plan = plan
        self.is_by_file = plan is not None
        self.device = device
        self._calibrated = device == CPU
        if device != CPU:
            # Ranks are forked, and cannot use a GPU that this process has used, if only to look
            # whether there is one.
            for name, value in kind_of(device).environment.items():
                os.environ.setdefault(name, value)
            from anabranch.runtime.ranks.placement import own_device

            own_device(device)
        self.gpus: int | None = None  # at the last attempt to train
        self.search_options: dict[str, Any] = {}  # of the search that has planned it here
        self.workload: Workload = source.workload()
        self.profile: Profile | None = None

    @property
    def captured(self) -> Captured:
        """The workload's module as a graph of operators, once it is needed."""
        return self._captured(self.source.rewrites)

    @remembered
    def _captured(self, rewrites: tuple[str, ...]) -> Captured:
        return replace(self.source, rewrites=rewrites).capture(self.workload)

    @staticmethod
    def of(source: ModelSource, local: LocalPlanSettings) -> Job:
        """Return the job for a model; a plan file, if there is one, decides all else."""
        plan = local.plan()
        if plan is None:
            cluster_to_plan_for(f"local:{local.num_devices}", calibrated=False)
        else:
            planned = {
                name: getattr(plan, name) for name in ("granularity", "rewrites", "precision")
            }
            source = replace(source, **planned)
        return Job(source, plan, local.device)

    def measure(self, batch_size: int, rewrites: tuple[str, ...] | None = None) -> Profile:
        """Time the operators here, on one thread each, as ranks do, or on a GPU.

        Args:
            rewrites: rewrites of the model; by default those of ``source``.
        """
        from anabranch.profile.profile import powers_of_two

        captured = self.captured if rewrites is None else self._captured(rewrites)
        captured = captured.under_autocast(self.source.precision, self.device)
        what = self.workload, powers_of_two(batch_size), captured
        time = partial(measured, *what, self.device, self.source.model)
        if self.device != CPU and not torchrun.is_rank():
            from anabranch import launch

            profile: Profile = launch.run(time, 1)[0]
        else:
            profile = time()
        self.profile = profile
        return profile

    def batch_size(self, local: LocalPlanSettings) -> int:
        """Return the samples of a batch: the plan's, else as asked for, else the data's."""
        if self.plan is not None:
            return self.plan.stage_graph.batch_size
        return local.batch_size or self.workload.batch_size or 32

    @remembered
    def cluster(self, devices: int) -> Cluster:
        """Return a cluster of this many local ranks, with the machine's kept calibration."""
        preset = Cluster.preset(f"local:{devices}")
        return as_calibrated(preset) if self._calibrated else preset

    def search(
        self,
        local: LocalPlanSettings,
        *,
        planner: str = "auto",
        own_cores: bool = False,
        tries_rewrites: bool = False,
        mode: str = "sync",
        policy: str = "",
        **options: Any,
    ) -> Plan:
        """Plan for local ranks.

        Args:
            own_cores: plan as if each rank had a core of its own.
            tries_rewrites: rewrite the model where that makes the step shorter, as ``plan`` does;
                ``source`` has these rewrites afterwards.
            options: further options of ``solve.plan``, such as ``max_replicas``.
        """
        from anabranch.runtime.state.optimizer_facts import optimizer_of
        from anabranch.solve import plan, plan_with_rewrites

        batch_size = self.batch_size(local)
        cluster = self.cluster(local.num_devices)
        planned = {"microbatch_size": local.microbatch_size, "schedule": local.schedule}
        self.search_options = {**planned, **options}
        profile = self.profile or self.measure(batch_size)
        begin_compiling(planner)  # not beside what is timed
        how = f" by planner {planner}" * (planner != "auto")
        announce(f"planning for {cluster.num_devices} device{'s' * (cluster.num_devices > 1)}{how}")

        def searched(profile: Profile) -> Plan:
            return usage(
                plan,
                profile,
                replace(cluster, cores=0) if own_cores else cluster,
                batch_size,
                planner=planner,
                model=self.source.model,
                mode=mode,
                policy=policy,
                optimizer=optimizer_of(self.workload) if mode == "async" else None,
                **self.search_options,
            )

        tried = plan_with_rewrites(
            profile,
            partial(self.measure, batch_size),
            searched,
            tries=tries_rewrites,
            announce=announce,
        )
        best_plan = tried.chosen()
        if best_plan.interrupted:
            raise SearchStoppedError(
                f"interrupted while {self.source.model} was planned, so nothing runs; anabranch "
                "plan -o FILE keeps the best plan until then, for --plan"
            )
        assert tried.best is not None
        rewrites, self.profile = tried.origin(tried.best)
        self.source = replace(self.source, rewrites=rewrites or self.source.rewrites)
        return replace(best_plan, options=self.source.recorded())

    def take_rewrites(self, plan: Plan) -> None:
        """Train the model as a plan has rewritten it, which another rank may have made."""
        if plan.rewrites != self.captured.graph.rewrites:
            self.source = replace(self.source, rewrites=plan.rewrites)

    def predicted(self, plan: Plan) -> Plan:
        """Return the plan with the figures that it has by operators measured here; with none if it
        was made for devices that are not, or runs otherwise than it can be simulated.
        """
        if plan.device.split(":")[0] != self.device or plan.machines is None:
            return replace(plan, predicted=None)
        from anabranch.runtime.state.optimizer_facts import optimizer_of
        from anabranch.solve import foreseen, simulate_async

        cluster = as_calibrated(plan.machines) if self._calibrated else plan.machines
        profile = self.profile or self.measure(plan.stage_graph.batch_size)
        if plan.mode == "sync":
            plan = plan.with_values_of(profile.graph)
            return replace(foreseen(plan, profile, cluster)[0], profile=profile.origin)
        predicted = None
        with suppress(AnabranchError):
            facts = optimizer_of(self.workload)
            simulated = simulate_async(plan, profile, cluster, optimizer=facts).plan
            if simulated.stage_graph == plan.stage_graph:
                predicted = simulated.predicted
        return replace(plan, predicted=predicted, machines=cluster, profile=profile.origin)
