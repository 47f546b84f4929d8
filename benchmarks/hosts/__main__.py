"""The recipes of docs/several-hosts.md, each run as it stands on two hosts.

python -m benchmarks.hosts [torchrun slurm operator job]

Hosts are network namespaces of this machine with names and a link of their own. What starts the
line on each of them is emulated: ``srun`` and ``scontrol`` by scripts of these names with Slurm's
variables, Kubernetes by the variables of its operator, or by the names of an indexed job's pods.
Two ranks per host, and a few steps, are all that is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.hosts import ADDRESSES, missing, two_hosts

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
_RANKS = 2  # per host

_SCONTROL = "#!/bin/sh\nprintf 'host-0\\nhost-1\\n'\n"


@dataclass(frozen=True)
class Recipe:
    """A line of the page.

    Attributes:
        starts: how its console line starts; empty for the command of the manifest.
        names: of both hosts.
        variables: that whatever starts it sets, by host; ``srun`` starts all hosts by itself.
    """

    starts: str
    names: tuple[str, str] = ("host-0", "host-1")
    variables: tuple[Mapping[str, str], ...] = field(default=({}, {}))


def _operator(rank: int) -> dict[str, str]:
    """What the training operator gives a pod of a ``PyTorchJob``."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(_RANKS),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "train-master-0",
        "PET_MASTER_PORT": "29500",
    }


RECIPES: Mapping[str, Recipe] = {
    "torchrun": Recipe("torchrun --nnodes"),
    "slurm": Recipe("srun"),
    "operator": Recipe(
        "torchrun -m", ("train-master-0", "train-worker-0"), (_operator(0), _operator(1))
    ),
    "job": Recipe("", ("train-0", "train-1")),
}


def line_of(recipe: Recipe, page: str) -> str:
    """The recipe as a shell has it, with so many ranks per host as are here."""
    if recipe.starts:
        lines = re.search(rf"^\$ ({re.escape(recipe.starts)}(?:.*\\\n)*.*)$", page, re.MULTILINE)
        if lines is None:
            raise RuntimeError(f"the page has no line that starts with {recipe.starts}")
        line = lines[1]
    else:
        line = shlex.join(command_of(page))
    line = re.sub(r"(--nproc-per-node[= ])\d+", rf"\g<1>{_RANKS}", line)
    # Behind the last word of the line, which Slurm's is quoted with.
    return re.sub(r"(plan\.json)('?)$", r"\1 --steps 20 --json\2", line)


def command_of(page: str) -> list[str]:
    """The container's command in the manifest of the page."""
    import yaml

    manifest = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    if manifest is None:
        raise RuntimeError("the page has no manifest")
    (job,) = [part for part in yaml.safe_load_all(manifest[1]) if part["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command: list[str] = container["command"]
    return command


@contextmanager
def named(hosts: tuple[str, str], names: tuple[str, str]) -> Iterator[None]:
    """Both hosts know both names, as a cluster's name service would tell them."""
    folders = [Path("/etc/netns") / host for host in hosts]
    # A pod is known with its service's name behind its own as well.
    known = [f"{a} {name}.train {name}" for a, name in zip(ADDRESSES, names, strict=True)]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            folder.joinpath("hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _entered(host: str, name: str) -> str:
    """What a command is written behind to run on a host."""
    enter = f"ip netns exec {host} unshare --uts"
    return f"{enter} sh -c 'hostname {name} && exec \"$@\"' sh"


def _srun(hosts: tuple[str, str], names: tuple[str, str]) -> str:
    """A script that starts its command on both hosts with the variables of Slurm."""
    starts = [
        f'SLURM_PROCID={i} SLURM_NODEID={i} {_entered(host, name)} "$@" & p{i}=$!'
        for i, (host, name) in enumerate(zip(hosts, names, strict=True))
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            '[ "$1 $2 $3 $4" = "--nodes 2 --ntasks-per-node 1" ] || exit 64',
            "shift 4",
            "export SLURM_JOB_NODELIST='host-[0-1]' SLURM_NTASKS=2 SLURM_JOB_NUM_NODES=2",
            *starts,
            "wait $p0 && wait $p1",
            "",
        ]
    )


def run(recipe: Recipe, folder: Path) -> str:
    """What the first rank says at the end.

    Raises:
        RuntimeError: if it fails.
    """
    page = (ROOT / "docs" / "several-hosts.md").read_text()
    line = line_of(recipe, page)
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    with two_hosts() as hosts, named(hosts, recipe.names):
        scripts = {"scontrol": _SCONTROL, "srun": _srun(hosts, recipe.names)}
        for name, text in scripts.items():
            tools.joinpath(name).write_text(text)
            tools.joinpath(name).chmod(0o755)
        if recipe.starts == "srun":
            starts = [(line, {})]
        else:
            places = zip(hosts, recipe.names, recipe.variables, strict=True)
            starts = [(f"{_entered(host, name)} {line}", dict(v)) for host, name, v in places]
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        common = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
        common |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
        running = [
            subprocess.Popen(
                ["bash", "-c", command],
                env=common | variables,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command, variables in starts
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S) for process in running]
        finally:
            for process in running:
                process.kill()
    if any(process.returncode for process in running):
        raise RuntimeError("\n".join(err[-2000:] for _, err in said))
    return "".join(out for out, _ in said)


def prepared(folder: Path) -> None:
    """Put the model of docs/workloads.md and a plan for all ranks into a folder."""
    page = (ROOT / "docs" / "workloads.md").read_text()
    model = re.search(r"```python\n(# mymodel\.py\n.*?)```", page, re.DOTALL)
    assert model is not None
    folder.joinpath("mymodel.py").write_text(model[1])
    plan = [sys.executable, "-m", "anabranch", "plan", "mymodel:workload", "--batch-size", "32"]
    plan += ["--cluster", f"local:{2 * _RANKS}", "--planner", "even", "-o", "plan.json"]
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(plan, cwd=folder, env=environment, check=True, capture_output=True)


def main() -> None:
    """Run recipes and say what came of each."""
    import json

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    names = parser.parse_args().names or list(RECIPES)
    if why := missing():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder)
        for recipe in names:
            figures: dict[str, Any] = json.loads(run(RECIPES[recipe], folder))
            losses = figures["losses"]
            print(f"{recipe}: {len(losses)} steps, loss {losses[0]:.6f} to {losses[-1]:.6f}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
