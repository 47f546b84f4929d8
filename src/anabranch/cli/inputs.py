"""From what the user typed to workloads, profiles, clusters and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import typer

from anabranch.cli.options import Granularity, Optimizer, Preset
from anabranch.cli.output import progress_bar
from anabranch.errors import AnabranchError, InvalidPlanError

if TYPE_CHECKING:
    from anabranch.cluster import Cluster
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.weights import OptimizerFacts
    from anabranch.workload import Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class Source:
    """A model as the user named it: MODEL with its preset and options, or a profile file."""

    model: str
    preset: Preset = Preset.published
    options: Mapping[str, str] = field(default_factory=dict)
    granularity: Granularity = Granularity.layer

    @property
    def is_file(self) -> bool:
        """Whether MODEL is a profile file."""
        return self.model.endswith((".json", ".txt")) or Path(self.model).is_file()

    @staticmethod
    def of_plan(
        plan: Plan,
        model: str | None = None,
        preset: Preset | None = None,
        options: Mapping[str, str] | None = None,
    ) -> Source:
        """What a plan was made for.

        Args:
            plan: with the preset and options of its model.
            model: another model, which is built without those.
            preset: what the user says goes before.
            options: likewise.
        """
        recorded = dict(plan.options) if model in (None, plan.model) else {}
        planned = Preset(recorded.pop("preset", "published"))
        return Source(
            model or plan.model,
            preset or planned,
            {**recorded, **(options or {})},
            Granularity(plan.granularity),
        )

    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Preset and options as a plan keeps them; no preset for a profile file."""
        preset = () if self.is_file else (("preset", self.preset.value),)
        return (*preset, *self.options.items())

    def capture(self, workload: Workload) -> Captured:
        """The workload's module as a graph of operators."""
        from anabranch.graph.capture import capture

        name = cast('Literal["operator", "layer", "block"]', self.granularity.value)
        return capture(workload.module, workload.example, granularity=name)

    def workload(self, *, meta: bool = False) -> Workload:
        """The workload; ``meta`` builds it without memory for its parameters, for planning."""
        from anabranch.model_names import resolve

        if self.is_file:
            raise typer.BadParameter(
                f"{self.model} is a profile; this needs the model itself, "
                "by name or package.module:function"
            )
        return usage(resolve, self.model, preset=self.preset.value, options=self.options, meta=meta)

    def profile(
        self, device: str, batch_size: int, samples: tuple[int, ...] | None = None
    ) -> Profile:
        """The profile file as it is; otherwise the model captured, then measured or estimated."""
        if self.is_file:
            return self._from_file(device, samples)
        return self._of_workload(self._built(device), device, batch_size, samples)

    def profile_and_optimizer(
        self, device: str, batch_size: int, named: Optimizer | None = None
    ) -> tuple[Profile, OptimizerFacts | None]:
        """The profile, and what policies have to know of the optimizer: of the one that is named,
        or of the workload's own; None for a profile file that comes without a name.
        """
        from anabranch.weights import OPTIMIZERS

        facts = OPTIMIZERS[named.value] if named is not None else None
        if self.is_file:
            return self._from_file(device, None), facts
        workload = self._built(device)
        if facts is None:
            from anabranch.runtime.asynchronous.optimizer_facts import optimizer_of

            facts = optimizer_of(workload)
        return self._of_workload(workload, device, batch_size, None), facts

    def _built(self, device: str) -> Workload:
        """The workload, with its parameters only where they are measured."""
        return self.workload(meta=not _is_here(device))

    def _of_workload(
        self, workload: Workload, device: str, batch_size: int, samples: tuple[int, ...] | None
    ) -> Profile:
        counts = samples or powers_of_two(batch_size)
        captured = self.capture(workload)
        if _is_here(device):
            from anabranch.profile.measure import measure

            with progress_bar(f"measuring {self.model} on {device}") as progress:
                return measure(captured, counts, device=device, progress=progress)
        from anabranch.profile.estimate import estimate

        return usage(estimate, captured, device, counts)

    def _from_file(self, device: str, samples: tuple[int, ...] | None) -> Profile:
        from anabranch.files import load_profile
        from anabranch.profile.readers import is_foreign, read_profile

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


def _is_here(device: str) -> bool:
    """Whether times for a device are measured on this machine, not estimated."""
    return device.split(":")[0] in ("cpu", "cuda")


def read_cluster(text: str) -> Cluster:
    """A preset or a cluster file."""
    from anabranch.files import load_cluster

    return usage(load_cluster, text)


def cluster_of(plan: Plan, file: Path, text: str | None) -> Cluster:
    """The cluster that the user names, or the one that a plan was made for.

    Raises:
        InvalidPlanError: if the plan has no more than the name of a cluster of the user's own.
    """
    from anabranch.cluster import Cluster

    if text is not None:
        return read_cluster(text)
    if plan.machines is not None:
        return plan.machines
    try:
        return Cluster.preset(plan.cluster)
    except ValueError:
        raise InvalidPlanError(
            f"{file} was made for a cluster called {plan.cluster!r}, which is no preset, and does "
            "not say what that has; name the cluster file it was made for, or another cluster, "
            "with --cluster FILE"
        ) from None


def try_plan(*args: Any, **options: Any) -> Plan | str:
    """A plan, or the reason why there is none."""
    from anabranch.solve import plan

    try:
        return plan(*args, **options)
    except AnabranchError as error:
        return str(error)


def split_output(values: list[str] | None) -> tuple[dict[str, str], Path | None]:
    """Tell ``-o layers=8`` (an option of the model) from ``-o plan.json`` (a file)."""
    options: dict[str, str] = {}
    file: Path | None = None
    for value in values or []:
        key, equals, rest = value.partition("=")
        if equals and key.replace("-", "_").isidentifier():
            options[key.replace("-", "_")] = rest
        elif file is not None:
            raise typer.BadParameter(f"two output files: {file} and {value}")
        else:
            file = Path(value)
    return options, file


def planner_options(values: list[str] | None, flag: str = "--planner-option") -> dict[str, object]:
    """``name=value`` pairs; true, false, none and numbers are what they look like."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    options: dict[str, object] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not name:
            raise typer.BadParameter(f"{flag} {text}: write NAME=VALUE")
        if name in options:
            raise typer.BadParameter(f"{flag} {name} is given twice; leave out one")
        options[name] = words.get(value.lower(), _number(value))
    return options


def options_by_planner(
    values: list[str] | None, chosen: Sequence[str], known: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, object]]:
    """``planner.name=value`` for one planner, ``name=value`` for all that have such an option.

    Args:
        values: what the user wrote.
        chosen: the planners that are compared.
        known: {planner: its options}, of these.

    Returns:
        {planner: {option: value}}; what is said of one planner goes before what is said of all.
    """
    found: dict[str, dict[str, object]] = {name: {} for name in chosen}
    given = [(*key.rpartition(".")[::2], value) for key, value in planner_options(values).items()]
    for scope, name, value in sorted(given, key=lambda each: each[0] != ""):
        # Planner names have dashes, which were taken for underscores.
        within = [p for p in chosen if not scope or p.replace("-", "_") == scope]
        having = [planner for planner in within if name in known[planner]]
        if not having:
            there = "; ".join(f"{p} has {', '.join(known[p]) or 'none'}" for p in within or chosen)
            what = f"{scope.replace('_', '-')}.{name}" if scope else name
            raise typer.BadParameter(
                f"--planner-option {what}: no planner compared has that option; {there}"
            )
        for planner in having:
            found[planner][name] = value
    return {planner: options for planner, options in found.items() if options}


def _number(text: str) -> float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... and ``largest`` itself."""
    return tuple(sorted({1 << i for i in range(largest.bit_length())} | {largest}))


def note(text: str) -> None:
    """A remark on standard error, so that standard output stays a document."""
    typer.secho(text, err=True, fg="yellow")


def parse_counts(text: str) -> tuple[int, ...]:
    """Sample counts such as ``1,2,4,8``."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"--samples {text}: write whole numbers such as 1,2,4,8") from None
    if counts[0] < 1:
        raise typer.BadParameter(f"--samples {text}: sample counts start at 1")
    return counts


def usage(function: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call with what the user typed; a ValueError about it is wrong usage (exit code 2)."""
    try:
        return function(*args, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
