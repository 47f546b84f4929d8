"""Models and profiles that the user names."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from anabranch.cli.output import note
from anabranch.cli.parsing import parse_counts, usage
from anabranch.cli.progress import announce, measured
from anabranch.device.kinds import GPU, is_measured
from anabranch.errors import SearchStoppedError
from anabranch.graph.opgraph import Granularity, Precision

if TYPE_CHECKING:
    from anabranch.graph.capture import Captured
    from anabranch.plans.plan import Plan
    from anabranch.profile.profile import Profile
    from anabranch.weights import OptimizerFacts
    from anabranch.workload import Workload

Preset = Literal["published", "small"]

ANY_GPU = "v100"
"""Device of an estimate where only bytes count, which are the same on all devices within 1 %."""


@dataclass(frozen=True)
class ModelSource:
    """A model as the user named it: MODEL with its preset and options, or a profile file.

    Attributes:
        rewrites: rewrites of the captured program, as text; see ``graph.rewrites``.
        precision: autocast under which costs are counted; None for the profile file's, or fp32.
        keep: whether an estimate uses a capture that an earlier command kept, or keeps its own.
        facts: for a JSON document, filled as the model is read: ``kept_capture``, if one is used.
        batch_size: samples of a training batch, to note why training would refuse the data of the
            user's own function; None for no such note.
    """

    model: str
    preset: str = "published"
    options: Mapping[str, str] = field(default_factory=dict)
    granularity: Granularity = "layer"
    keep: bool = True
    rewrites: tuple[str, ...] = ()
    batch_size: int | None = None
    precision: Precision | None = None
    facts: dict[str, bool] = field(default_factory=dict, init=False, compare=False)

    @property
    def is_file(self) -> bool:
        """True if MODEL is a profile file."""
        is_file = self.model.endswith((".json", ".txt")) or Path(self.model).is_file()
        return is_file and not self.model.endswith(".py")

    def is_timed(self, device: str) -> bool:
        """Return True if operators are timed on this machine for the profile of a device."""
        return not self.is_file and is_measured(device)

    @staticmethod
    def of_plan(
        plan: Plan,
        model: str,
        preset: str | None = None,
        options: Mapping[str, str] | None = None,
        *,
        keep: bool = True,
    ) -> ModelSource:
        """Return the model that the user names. If it is the plan's, it has the preset and options
        of the plan, which ``preset`` and ``options`` of the user override.
        """
        recorded = dict(plan.options) if model == plan.model else {}
        planned = recorded.pop("preset", "published")
        return ModelSource(
            model,
            preset or planned,
            {**recorded, **(options or {})},
            plan.granularity,
            keep,
            plan.rewrites,
            precision=None if plan.precision == "fp32" else plan.precision,  # as a profile has it
        )

    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Return preset and options as a plan keeps them; no preset for a profile file, nor for the
        user's own function unless one is asked for.
        """
        is_own = ":" in self.model and self.preset == ModelSource.preset
        preset = () if self.is_file or is_own else (("preset", self.preset),)
        return (*preset, *self.options.items())

    def capture(self, workload: Workload) -> Captured:
        """Return the workload's module as a graph of operators."""
        from anabranch.graph.capture import capture_to_plan

        with self._capturing():
            captured = capture_to_plan(
                workload, granularity=self.granularity, rewrites=self.rewrites
            )
        if self.batch_size is not None and ":" in self.model:
            from anabranch.runtime.data_feed import refusal_of_data

            if refusal := refusal_of_data(captured, workload, self.batch_size):
                note(f"a plan can be made, but training would refuse its data: {refusal}")
        return captured

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Convert Ctrl-C inside the block into an error that says what it ended."""
        try:
            yield
        except KeyboardInterrupt:
            raise SearchStoppedError(
                f"interrupted while {self.model} was captured; nothing was planned or trained"
            ) from None

    def workload(self, *, meta: bool = False) -> Workload:
        """The workload; ``meta`` builds it without memory for its parameters, for planning."""
        if self.model.endswith(".toml"):
            raise typer.BadParameter(
                f"{self.model} is a run file, which `anabranch train` takes; this needs the model "
                "itself, by name or package.module:function"
            )
        if self.is_file:
            raise typer.BadParameter(
                f"{self.model} is a file, as profiles are; this needs the model itself, by name or "
                "package.module:function"
            )
        announce(f"loading and capturing {self.model}")
        from anabranch.files.capture_cache import files_read
        from anabranch.models.names import resolve

        with files_read():  # a kept capture depends on them
            return usage(resolve, self.model, preset=self.preset, options=self.options, meta=meta)

    def profile(
        self, device: str, batch_size: int, samples: tuple[int, ...] | None = None
    ) -> Profile:
        """The profile file as it is; otherwise the model captured, then measured or estimated."""
        return self.profile_and_optimizer(device, batch_size, "sync", None, samples=samples)[0]

    def profile_and_optimizer(
        self,
        device: str,
        batch_size: int,
        mode: str,
        optimizer: str | None,
        *,
        times: bool = True,
        samples: tuple[int, ...] | None = None,
        policy: str | None = None,
    ) -> tuple[Profile, OptimizerFacts | None]:
        """Return the profile and, without a flush, facts of the optimizer, None where unknown.

        Args:
            times: whether the seconds count; otherwise nothing is timed, whatever the device.
            samples: counts to measure or estimate at; by default powers of two.
            policy: weight policy that the optimizer has to suit; checked before anything is timed.
        """
        from anabranch.profile.profile import powers_of_two
        from anabranch.weights import OPTIMIZERS, policy_named, require_optimizer

        if mode == "sync" and optimizer is not None:
            raise typer.BadParameter("--optimizer is for --mode async")
        facts = OPTIMIZERS[optimizer] if optimizer is not None else None
        if self.is_file:
            profile = read_profile_file(self.model, self.options, device, samples)
            if self.precision not in (None, profile.graph.precision):
                raise typer.BadParameter(
                    f"{self.model} is a profile in {profile.graph.precision}; for another make one "
                    f"with anabranch profile MODEL --precision {self.precision}"
                )
            return profile, facts
        if not times and is_measured(device):
            device = ANY_GPU
        counts = samples or powers_of_two(batch_size)
        # Parameters have memory only where they are measured.
        build: Callable[[], Workload] = partial(self.workload, meta=not is_measured(device))
        if mode == "async" and facts is None:
            from anabranch.runtime.asynchronous.requirements import common_norm_remark
            from anabranch.runtime.state.optimizer_facts import optimizer_of

            workload = build()
            if remark := common_norm_remark(workload):
                note(remark)
            facts, build = optimizer_of(workload), lambda: workload
        if mode == "async" and policy and policy != "auto" and facts is not None:
            require_optimizer(policy_named(policy), facts)
        return self._costs(build, device, counts), facts

    def _costs(
        self, build: Callable[[], Workload], device: str, counts: tuple[int, ...]
    ) -> Profile:
        self.facts["kept_capture"] = False
        if is_measured(device):
            workload = build()
            captured = self.capture(workload).under_autocast(self.precision, device.split(":")[0])
            return measured(workload, counts, captured, device, self.model)
        from anabranch.files.capture_cache import estimated

        options = (f"{name}={value}" for name, value in sorted(self.options.items()))
        how = self.granularity, *self.rewrites, str(self.precision)
        with self._capturing():
            return usage(
                estimated,
                self.model,
                build,
                lambda workload: self.capture(workload).under_autocast(self.precision, GPU),
                device,
                counts,
                settings=[self.preset, *options, *how],
                keep=self.keep,
                on_kept=self._say_kept,
            )

    def _say_kept(self) -> None:
        self.facts["kept_capture"] = True
        note(f"{self.model}: by the capture that is kept; --no-cache captures anew")


def read_profile_file(
    model: str, options: Mapping[str, str], device: str, samples: tuple[int, ...] | None
) -> Profile:
    """Return the profile in a file; note whose seconds it has if another device is asked for.

    Args:
        options: options that the user gives for the model.
        samples: sample counts that the user asks for, if any.
    """
    from anabranch.files import load_profile
    from anabranch.files.pipedream import is_foreign, read_profile

    path = Path(model)
    if is_foreign(path):
        profile = usage(read_profile, path, _samples(model, options, samples))
    elif options or samples:
        names = ", ".join([*options, *(["--samples"] if samples else [])])
        raise typer.BadParameter(f"{model} is a profile; options ({names}) do nothing")
    else:
        profile = load_profile(path)
    if profile.source == "imported":
        note(
            f"{model} is imported: its seconds are those of {profile.device}, whatever device is "
            "asked for"
        )
    elif profile.device.split(":")[0] != device.split(":")[0]:
        note(
            f"{model} has times for {profile.device}, but {device} is asked for: the seconds below "
            "are those of the former"
        )
    return profile


def _samples(model: str, options: Mapping[str, str], counts: tuple[int, ...] | None) -> int | None:
    """Return the samples in a mini-batch of another project's profile, if the user names them."""
    if unknown := ", ".join(name for name in options if name != "samples"):
        raise typer.BadParameter(f"{model} is a profile; its only option is samples, not {unknown}")
    counts = parse_counts(options["samples"]) if "samples" in options else counts
    if counts and len(counts) > 1:
        raise typer.BadParameter(
            f"{model} was measured with one mini-batch; say how many samples that had, one number, "
            f"not {', '.join(map(str, counts))}"
        )
    return counts[0] if counts else None


def model_in_file(model: str, file: Path, command: str) -> str:
    """Return the model that a file names: built-in or a profile, never a function to be imported.

    Args:
        file: for the message.
        command: what the user can write instead to name a function.
    """
    if ":" in model and not ModelSource(model).is_file:
        raise typer.BadParameter(
            f"{file} names the function {model}, and no file makes anabranch import code; "
            f"if you trust that code: {command}"
        )
    return model


def model_of_plan(model: str, file: Path) -> str:
    """Return ``model_in_file`` for the model of a plan, whose verb takes another one behind it."""
    return model_in_file(model, file, command_naming(model, file))


def command_naming(model: str, file: Path) -> str:
    """Return the command that runs, with the model named behind the file."""
    words = sys.argv[1:]
    at = next((i for i, word in enumerate(words, 1) if Path(word) == file), len(words))
    return shlex.join(["anabranch", *words[:at], model, *words[at:]])
