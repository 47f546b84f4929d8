"""Models, profiles and clusters that the user names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer

from anabranch.cli.output import note
from anabranch.cli.parsing import parse_counts, powers_of_two, usage
from anabranch.cli.progress import progress_bar
from anabranch.cluster import Cluster
from anabranch.errors import InvalidPlanError, SearchStoppedError
from anabranch.graph.opgraph import Granularity, OpGraph

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.weights import OptimizerFacts
    from anabranch.workload import Workload

Preset = Literal["published", "small"]

ANY_GPU = "v100"
"""Whose data sheet an estimate takes where only the bytes count: operators keep the same for their
backward on all devices, but for a per cent.
"""


@dataclass(frozen=True)
class ModelSource:
    """A model as the user named it: MODEL with its preset and options, or a profile file.

    Attributes:
        keep: an estimate takes the capture that an earlier command kept, and keeps a new one.
        facts: for a JSON document, filled as the model is read: ``kept_capture``, whether an
            earlier command captured it.
    """

    model: str
    preset: str = "published"
    options: Mapping[str, str] = field(default_factory=dict)
    granularity: str = "layer"
    keep: bool = True
    facts: dict[str, bool] = field(default_factory=dict, init=False, compare=False)

    @property
    def is_file(self) -> bool:
        """Whether MODEL is a profile file."""
        is_file = self.model.endswith((".json", ".txt")) or Path(self.model).is_file()
        return is_file and not self.model.endswith(".py")

    def is_timed(self, device: str) -> bool:
        """Whether a profile for a device comes from operators that are timed on this machine."""
        return not self.is_file and _is_here(device)

    @staticmethod
    def of_plan(
        plan: Plan,
        model: str,
        preset: str | None = None,
        options: Mapping[str, str] | None = None,
        *,
        keep: bool = True,
    ) -> ModelSource:
        """The model that the user names, with the preset and options of the plan if it is the
        plan's; what the user gives as ``preset`` and ``options`` goes before.
        """
        recorded = dict(plan.options) if model == plan.model else {}
        planned = recorded.pop("preset", "published")
        return ModelSource(
            model,
            preset or planned,
            {**recorded, **(options or {})},
            plan.granularity,
            keep,
        )

    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Preset and options as a plan keeps them; no preset for a profile file, nor for the user's
        own function unless one is asked for.
        """
        is_own = ":" in self.model and self.preset == ModelSource.preset
        preset = () if self.is_file or is_own else (("preset", self.preset),)
        return (*preset, *self.options.items())

    def capture(self, workload: Workload) -> Captured:
        """The workload's module as a graph of operators."""
        from anabranch.graph.capture import capture

        granularity = cast("Granularity", self.granularity)
        with self._capturing():
            return capture(
                workload.module,
                workload.example,
                granularity=granularity,
                per_sample=workload.per_sample,
            )

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Ctrl-C inside says what it ended."""
        try:
            yield
        except KeyboardInterrupt:
            raise SearchStoppedError(
                f"interrupted while {self.model} was captured; nothing was planned or trained"
            ) from None

    def workload(self, *, meta: bool = False) -> Workload:
        """The workload; ``meta`` builds it without memory for its parameters, for planning."""
        from anabranch.models.names import resolve

        if self.model.endswith(".toml"):
            raise typer.BadParameter(
                f"{self.model} is a run file, which `anabranch train` takes; this needs the model "
                "itself, by name or package.module:function"
            )
        if self.is_file:
            raise typer.BadParameter(
                f"{self.model} is a profile; this needs the model itself, "
                "by name or package.module:function"
            )
        return usage(resolve, self.model, preset=self.preset, options=self.options, meta=meta)

    def profile(
        self, device: str, batch_size: int, samples: tuple[int, ...] | None = None
    ) -> Profile:
        """The profile file as it is; otherwise the model captured, then measured or estimated."""
        if self.is_file:
            return self._from_file(device, samples)
        return self._costs(lambda: self._built(device), device, batch_size, samples)

    def profile_and_optimizer(
        self, device: str, batch_size: int, mode: str, optimizer: str | None, *, times: bool = True
    ) -> tuple[Profile, OptimizerFacts | None]:
        """The profile and, without a flush, the optimizer's traits, None where unknown.

        Args:
            times: whether the seconds count; otherwise nothing is timed, whatever the device.

        Raises:
            PolicyError: if the model cannot be trained without a flush, where that is seen.
        """
        from anabranch.weights import OPTIMIZERS

        if mode == "sync" and optimizer is not None:
            raise typer.BadParameter("--optimizer is for --mode async")
        facts = OPTIMIZERS[optimizer] if optimizer is not None else None
        if self.is_file:
            return self._from_file(device, None), facts
        if not times and _is_here(device):
            device = ANY_GPU
        workload: Workload | None = None
        if mode == "async" and facts is None:
            from anabranch.runtime.asynchronous.requirements import require_no_common_norm
            from anabranch.runtime.optimizer_facts import optimizer_of

            workload = self._built(device)
            require_no_common_norm(workload)
            facts = optimizer_of(workload)

        def build() -> Workload:
            return workload or self._built(device)

        return self._costs(build, device, batch_size, None), facts

    def _built(self, device: str) -> Workload:
        """The workload, with its parameters only where they are measured."""
        return self.workload(meta=not _is_here(device))

    def _costs(
        self,
        build: Callable[[], Workload],
        device: str,
        batch_size: int,
        samples: tuple[int, ...] | None,
    ) -> Profile:
        self.facts["kept_capture"] = False
        counts = samples or powers_of_two(batch_size)
        if _is_here(device):
            from anabranch.runtime.measurement.workload import measure_workload

            workload = build()
            captured = self.capture(workload)
            with progress_bar(f"measuring {self.model} on {device}") as progress:
                return measure_workload(
                    workload, counts, captured=captured, device=device, progress=progress
                )
        from anabranch.capture_cache.estimated import estimated

        with self._capturing():
            return usage(
                estimated,
                self.model,
                build,
                device,
                counts,
                preset=self.preset,
                options=self.options,
                granularity=self.granularity,
                keep=self.keep,
                on_kept=self._say_kept,
            )

    def _say_kept(self) -> None:
        self.facts["kept_capture"] = True
        note(f"{self.model}: by the capture that is kept; --no-cache captures anew")

    def _from_file(self, device: str, samples: tuple[int, ...] | None) -> Profile:
        from anabranch.files import load_profile
        from anabranch.profile.pipedream import is_foreign, read_profile

        path = Path(self.model)
        if is_foreign(path):
            found = usage(read_profile, path, self._samples_of_file(samples))
        elif self.options or samples:
            names = ", ".join([*self.options, *(["--samples"] if samples else [])])
            raise typer.BadParameter(f"{self.model} is a profile; options ({names}) do nothing")
        else:
            found = load_profile(path)
        if found.source == "imported":
            note(
                f"{self.model} is imported: its seconds are those of {found.device}, "
                "whatever device is asked for"
            )
        elif found.device.split(":")[0] != device.split(":")[0]:
            note(
                f"{self.model} has times for {found.device}, but {device} is asked for: "
                "the seconds below are those of the former"
            )
        return found

    def _samples_of_file(self, counts: tuple[int, ...] | None) -> int | None:
        """How many samples a mini-batch of another project's profile has, if the user says so."""
        unknown = ", ".join(name for name in self.options if name != "samples")
        if unknown:
            raise typer.BadParameter(
                f"{self.model} is a profile; its only option is samples, not {unknown}"
            )
        counts = parse_counts(self.options["samples"]) if "samples" in self.options else counts
        if counts and len(counts) > 1:
            raise typer.BadParameter(
                f"{self.model} was measured with one mini-batch; say how many samples that had, "
                f"one number, not {', '.join(map(str, counts))}"
            )
        return counts[0] if counts else None


def model_in_file(model: str, file: Path, command: str) -> str:
    """Return the model that a file names: built-in or a profile, never a function to be imported.

    Args:
        file: for the message.
        command: what the user can write instead to name a function.

    Raises:
        typer.BadParameter: if it is a function; a file runs no code.
    """
    if ":" in model and not ModelSource(model).is_file:
        raise typer.BadParameter(
            f"{file} names the function {model}, and no file makes anabranch import code; "
            f"if you trust that code: {command}"
        )
    return model


def _is_here(device: str) -> bool:
    """Whether times for a device are measured on this machine, not estimated."""
    return device.split(":")[0] in ("cpu", "cuda")


def read_cluster(text: str, *, calibrated: bool = True) -> Cluster:
    """A preset or a cluster file; local ranks with the kept calibration of this machine, which is
    said, unless the user does without.
    """
    from anabranch.files import load_cluster

    return as_calibrated(usage(load_cluster, text), calibrated=calibrated)


def as_calibrated(cluster: Cluster, *, calibrated: bool = True) -> Cluster:
    """A cluster of local ranks with the kept calibration of this machine; what is used is said."""
    if not calibrated:
        return replace(cluster, calibration=None)
    from anabranch.calibration import kept

    cluster, sentence = kept.calibrated(cluster)
    for said in (sentence, *kept.remarks(cluster)):
        if said:
            note(said)
    return cluster


def note_other_model(plan: Plan, graph: OpGraph) -> None:
    """Say that a plan file was made for a model of another size, if that is so."""
    if said := plan.other_model(graph):
        note(said)


def note_uncalibrated(plan: Plan) -> None:
    """Say that the prediction of a plan file for local ranks leaves something out, if it does."""
    from anabranch.calibration.kept import COMMAND, is_calibrated, is_local

    if plan.machines is not None and is_local(plan.machines):
        is_by_now = is_calibrated(plan.machines)
        todo = "this machine is calibrated by now: plan" if is_by_now else f"{COMMAND}, then plan"
        note(
            f"the plan was made for {plan.machines.name} without a calibration, so its prediction "
            f"leaves out what ranks cost each other; {todo} again"
        )


def note_crowded(plan: Plan) -> None:
    """Say that more ranks than there are processor cores will compute here by a plan for devices
    of which each computes on its own; the prediction for local ranks knows that they do not.
    """
    machines = plan.machines
    is_foreseen = machines.cores if machines is not None else plan.cluster.startswith("local:")
    ranks, cores = len(plan.stage_graph.devices), os.cpu_count() or 1
    if ranks > cores and not is_foreseen:
        note(
            f"{ranks} ranks take turns on {cores} processor core{'s' if cores > 1 else ''} here, "
            f"but the plan for {plan.cluster} has a device for each, so how long steps take says "
            "nothing about the plan; anabranch rehearse waits as long as its devices would compute"
        )


def cluster_of(plan: Plan, file: Path, text: str | None, *, calibrated: bool = True) -> Cluster:
    """The cluster that the user names, or the one that a plan was made for; raises InvalidPlanError
    where a plan has no more than the name of a cluster of the user's own.
    """
    if text is not None:
        return read_cluster(text, calibrated=calibrated)
    if plan.machines is not None:
        return as_calibrated(plan.machines, calibrated=calibrated)
    try:
        return read_cluster(plan.cluster, calibrated=calibrated)
    except (ValueError, typer.BadParameter):
        raise InvalidPlanError(
            f"{file} was made for a cluster called {plan.cluster!r}, which is no preset, and does "
            "not say what that has; name the cluster file it was made for, or another cluster, "
            "with --cluster FILE"
        ) from None
