"""A model that is about to run on local ranks, with its profile and plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli.parsing import powers_of_two, usage
from anabranch.cli.preflight import require_own_devices
from anabranch.cli.progress import TrainingProgress, begin_compiling, progress_bar
from anabranch.cli.settings import LocalPlanSettings
from anabranch.cli.source import ModelSource, as_calibrated
from anabranch.cli.training_settings import TrainingSettings
from anabranch.cluster import Cluster
from anabranch.errors import AnabranchError
from anabranch.remembered import remembered

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.record import Run
    from anabranch.timeline import Timeline
    from anabranch.training import Looks
    from anabranch.workload import Workload


class Job:
    """A model that is about to run: workload, captured graph, measured profile, plan."""

    def __init__(self, source: ModelSource, plan: Plan | None, device: str = "cpu") -> None:
        self.source = source
        self.plan = plan
        self._is_by_file = plan is not None
        self.device = device
        self._calibrated = device == "cpu"
        if device == "cuda":
            # Ranks are forked, and cannot use a GPU that this process has used, if only to look
            # whether there is one.
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
            from anabranch.runtime.placement import own_device

            own_device(device)
        self._gpus: int | None = None
        self._search: dict[str, Any] = {}  # how it was planned here, if it was
        self.workload: Workload = source.workload()
        self.profile: Profile | None = None

    @cached_property
    def captured(self) -> Captured:
        """The workload's module as a graph of operators, once it is needed."""
        return self.source.capture(self.workload)

    @staticmethod
    def of(source: ModelSource, local: LocalPlanSettings) -> Job:
        """The job for a model, by a plan file if there is one; then nothing else is asked."""
        if local.plan_file is None:
            return Job(source, None, local.device)
        from anabranch.files import load_plan

        local.require_no_other()
        plan = load_plan(local.plan_file)
        require_own_devices(plan, local.plan_file)
        source = replace(source, granularity=plan.granularity)
        return Job(source, plan, local.device)

    def forget_plan(self) -> None:
        """It is to be planned anew, here."""
        self.plan, self._is_by_file = None, False

    def measure(self, batch_size: int) -> Profile:
        """Time the operators here, on one thread each, as ranks do, or on a GPU."""
        from anabranch import launch
        from anabranch.runtime.measurement.workload import measure_workload

        time = partial(
            measure_workload,
            self.workload,
            powers_of_two(batch_size),
            captured=self.captured,
            device=self.device,
        )
        if self.device == "cuda" and "RANK" not in os.environ:
            found: Profile = launch.run(time, 1)[0]
        else:
            with progress_bar(f"measuring {self.source.model}") as progress:
                found = time(progress=progress)
        self.profile = found
        return found

    def batch_size(self, local: LocalPlanSettings) -> int:
        """Samples of a batch: of the plan, if there is one; as asked for; or of the data."""
        if self.plan is not None:
            return self.plan.stage_graph.batch_size
        return local.batch_size or self.workload.batch_size or 32

    @remembered
    def cluster(self, devices: int) -> Cluster:
        """So many local ranks, with the kept calibration of this machine."""
        preset = Cluster.preset(f"local:{devices}")
        return as_calibrated(preset) if self._calibrated else preset

    def search(
        self,
        local: LocalPlanSettings,
        *,
        max_replicas: int | None,
        planner: str = "auto",
        own_cores: bool = False,
        mode: str = "sync",
        policy: str = "",
        shard_optimizer: bool | None = None,
        sparse_embeddings: bool = False,
    ) -> Plan:
        """Plan for local ranks; ``own_cores`` as if each had a core of its own."""
        from anabranch.runtime.optimizer_facts import optimizer_of
        from anabranch.solve import plan

        batch_size = self.batch_size(local)
        cluster = self.cluster(local.num_devices)
        self._search = {
            "microbatch_size": local.microbatch_size,
            "schedule": local.schedule,
            "max_replicas": max_replicas,
            "shard_optimizer": shard_optimizer,
            "sparse_embeddings": sparse_embeddings,
        }
        profile = self.profile or self.measure(batch_size)
        begin_compiling(planner)  # not beside what is timed
        found = usage(
            plan,
            profile,
            replace(cluster, cores=0) if own_cores else cluster,
            batch_size,
            planner=planner,
            model=self.source.model,
            mode=mode,
            policy=policy,
            optimizer=optimizer_of(self.workload) if mode == "async" else None,
            **self._search,
        )
        return replace(found, options=self.source.recorded())

    def predicted(self, plan: Plan) -> Plan:
        """The plan with the figures that it has by operators measured here; with none if it was
        made for devices that are not.
        """
        from anabranch.solve import foreseen

        if plan.device.split(":")[0] != self.device or plan.machines is None:
            return replace(plan, predicted=None)
        cluster = as_calibrated(plan.machines) if self._calibrated else plan.machines
        profile = self.profile or self.measure(plan.stage_graph.batch_size)
        return replace(foreseen(plan, profile, cluster)[0], profile=profile.origin)

    def train(
        self,
        training: TrainingSettings,
        *,
        is_async: bool = False,
        predicted_s: float = 0.0,
        on_interrupt: Callable[[], None] | None = None,
        **options: Any,
    ) -> Run:
        """Train on local ranks, or as this rank of torchrun, with ``predicted_s`` (of a step or
        mini-batch) shown beside the measured; ``on_interrupt`` is that of ``launch.run``.
        """
        from anabranch import launch
        from anabranch.calibration.machine import OtherLoad
        from anabranch.runtime.asynchronous.requirements import round_robin_of
        from anabranch.runtime.guards.interrupt import listening
        from anabranch.runtime.guards.stall import PATIENCE_S, default_timeout_s
        from anabranch.runtime.plan_parts import prepare
        from anabranch.training import train, train_async

        plan, saves, logs = self.plan, training.saves(), training.loggers()
        timeout_s = training.timeout or default_timeout_s(predicted_s)
        assert plan is not None
        # Once here rather than in every rank: forked ranks inherit it.
        prepare(self.captured, plan.stage_graph, self.workload)
        rounds = round_robin_of(plan) if options.get("round_robin") else None
        if rounds is not None:
            prepare(self.captured, rounds.for_turn(0, plan.stage_graph.batch_size), self.workload)
        if not is_async and (looks := self._looks(replans=training.replan)) is not None:
            options["looks"] = looks

        def rank() -> Run:
            return (train_async if is_async else train)(
                self.workload,
                plan,
                steps=training.last_step,
                epochs=training.epochs,
                captured=self.captured,
                resume=training.resume,
                weights=training.weights,
                save=training.save,
                save_every=saves,
                check_gradients=training.check_gradients,
                evaluate_every=training.evaluate_every,
                callbacks=(TrainingProgress(predicted_s, is_async=is_async), *logs),
                device=self.device,
                timeout=max(timeout_s, PATIENCE_S) + PATIENCE_S,  # who watches is sooner
                stall_timeout=timeout_s,
                **options,
            )

        if "RANK" in os.environ:
            with listening():
                return rank()
        devices, load = len(plan.stage_graph.devices), OtherLoad()
        run = launch.run(rank, devices, stall_timeout=timeout_s, on_interrupt=on_interrupt)[0]
        return replace(run, others_share=load.share())

    def _looks(self, *, replans: bool) -> Looks | None:
        """What training is compared with meanwhile: nothing where only a plan file knows the
        prediction, unless there may be another plan.
        """
        from anabranch.solve.replanning import Replanner
        from anabranch.training import Looks

        assert self.plan is not None
        if self._is_by_file and not replans:
            return None
        graph = self.plan.stage_graph
        if os.environ.get("RANK", "0") != "0":
            return Looks(replans=replans)
        profile = self.profile or self.measure(graph.batch_size)
        # What a plan file has decided of memory and sums stays.
        options = self._search or {
            "shard_optimizer": self.plan.shard_optimizer,
            "sparse_embeddings": self.plan.sparse_embeddings,
        }
        replanner = Replanner(profile, self.cluster(len(graph.devices)), options)
        return Looks(replans=replans, replanner=replanner)

    def devices_left(self) -> int:
        """Devices for ranks, where some may have gone since the plan was made.

        Under torchrun as many as there are ranks now; here GPUs may go, CPUs do not.
        """
        assert self.plan is not None
        if "WORLD_SIZE" in os.environ:
            return int(os.environ["WORLD_SIZE"])
        planned = len(self.plan.stage_graph.devices)
        if self.device != "cuda":
            return planned
        import torch

        now = torch.cuda.device_count()
        lost, self._gpus = max((self._gpus or now) - now, 0), now
        return max(planned - lost, 1)

    def keep(self, run: Run, folder: Path, plan: Plan | None = None) -> Run:
        """Write the run's folder with the predicted timeline, and what its step is spent on;
        ``plan`` as it was executed.
        """
        from anabranch.record import Origin, Part, save_run
        from anabranch.solve import explain

        run = replace(run, plan=plan or run.plan, origin=Origin.here())
        if self.profile is not None and run.predicted is not None:
            cluster = self.cluster(len(run.plan.stage_graph.devices))
            predicted, timeline = self.foreseen(run.plan)
            timelines = (("predicted", timeline), *run.timelines)
            run = replace(run, plan=predicted, timelines=timelines)
            if run.mode == "sync":
                why = explain(predicted, self.profile, cluster)
                parts = tuple(Part(*line) for line in why.parts())
                run = replace(run, parts=parts)
        save_run(run, folder)
        return run

    def foreseen(self, plan: Plan) -> tuple[Plan, Timeline]:
        """A plan with its figures where the ranks share this machine's cores, and the timeline."""
        from anabranch.solve import foreseen, simulate

        assert self.profile is not None
        cluster = self.cluster(len(plan.stage_graph.devices))
        if plan.mode == "async":  # whose figures are of the full pipeline, not of the timeline
            return plan, simulate(plan, self.profile, cluster)
        return foreseen(plan, self.profile, cluster)


def agreed(search: Callable[[], Plan]) -> Plan:
    """Under torchrun: the first rank plans, the others take its plan (measurements differ)."""
    import torch.distributed as dist

    from anabranch.files import plan_from_dict, plan_to_dict
    from anabranch.runtime import texts
    from anabranch.runtime.process_groups import join

    join()
    found, failure = None, None
    if dist.get_rank() == 0:
        try:
            found = search()
        except AnabranchError as error:
            failure = error
    document = {} if found is None else plan_to_dict(found)
    told = json.loads(texts.from_first(json.dumps(document)))
    if failure is not None:
        raise failure
    if not told:
        raise typer.Exit(1)  # the first rank says why; the others just end
    return found or plan_from_dict(told, "the plan of rank 0")
