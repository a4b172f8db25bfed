"""The command that starts a job on every device of one machine or of a Slurm allocation.

Pure: environment in, command line out. Nothing here starts a process.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from train.config_text import ConfigError
from train.errors import UserError


def launch_command(
    config_args: Sequence[str],
    env: Mapping[str, str],
    nnodes: int | None = None,
    nproc: int | None = None,
) -> str:
    """The line that starts this job: ``torchrun``, under ``srun`` in a Slurm allocation of several nodes.

    Args:
        config_args: what follows ``functitan train``: the recipe and the options.
        env: the environment to read the allocation from (``os.environ``).
        nnodes: machines; by default those of the Slurm allocation, else 1.
        nproc: processes on each machine, one a device; by default the GPUs that Slurm gave each node, else "gpu",
            with which torchrun starts one process for each GPU that it finds.

    Raises:
        UserError: more nodes than the allocation has, an allocation whose variables contradict each other or cannot
            be read, or several nodes outside Slurm without MASTER_ADDR, the machine at which they are to meet.
    """
    nodes, processes = job_size(env, nnodes, nproc)
    allocated = _slurm_nodes(env)
    each = ["--nproc-per-node", "gpu" if processes is None else str(processes)]
    # Not "-m train", which would run a train.py of the working folder.
    job = ["--no-python", "functitan", "train", *config_args]
    if nodes == 1:
        return shlex.join(["torchrun", "--standalone", *each, *job])
    torchrun = ["torchrun", "--nnodes", str(nodes), *each, *_rendezvous(env, allocated), *job]
    if allocated is None:
        return shlex.join(torchrun)
    # One torchrun a node, which starts that node's processes. srun does not take --cpus-per-task over from sbatch.
    srun = ["srun", "--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    if "SLURM_CPUS_PER_TASK" in env:
        srun += ["--cpus-per-task", env["SLURM_CPUS_PER_TASK"]]
    return shlex.join(srun + torchrun)


def job_size(env: Mapping[str, str], nnodes: int | None, nproc: int | None) -> tuple[int, int | None]:
    """Machines, and processes on each (None: as many as torchrun finds GPUs), as :func:`launch_command` takes them.

    Raises:
        UserError: a number below 1, or more nodes than the allocation has.
    """
    allocated = _slurm_nodes(env)
    nodes = nnodes if nnodes is not None else allocated or 1
    processes = nproc if nproc is not None else _slurm_gpus(env)
    if nodes < 1:
        raise ConfigError([f"--nnodes: is {nodes}; give 1 or more"])
    if allocated is not None and nodes > allocated:
        raise ConfigError([f"--nnodes: is {nodes}, but the Slurm allocation has {allocated}; give 1 to {allocated}"])
    if processes is not None and processes < 1:
        raise ConfigError([f"--nproc: is {processes}; give 1 or more"])
    return nodes, processes


def rendezvous_port(job_id: str | None) -> int:
    """The TCP port at which the nodes of a job meet: 20000 + job id modulo 10000, or 29400 without a job.

    It must be the same on every node without their talking, and differ between jobs that share a node: the job id
    is both. 20000 … 29999 lies below the ports that Linux hands to outgoing connections (32768 … 60999), where
    a chosen number may be taken at any moment, and above the well-known services. 29400 is torchrun's default.
    """
    digits = re.match(r"\d+", job_id or "")
    return 20000 + int(digits.group()) % 10000 if digits else 29400


def expand_nodelist(text: str) -> list[str]:
    """Host names of a Slurm node list: ``"node[01-03,7],gpu1"`` → node01, node02, node03, node7, gpu1.

    Does what ``scontrol show hostnames`` does, without Slurm: several brackets in one name multiply, the first
    varying slowest, and numbers keep the width in which they are written.

    Raises:
        UserError: unbalanced brackets, an empty list, or a range that runs backwards.
    """
    hosts: list[str] = []
    for pattern in _split_outside_brackets(text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", pattern):
            parts = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + part for name in names for part in parts]
        hosts += names
    if not hosts or not all(hosts):
        raise UserError(f"node list {text!r} has an empty name: expected names such as node[01-03,7],gpu1")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth != 0:
        raise UserError(f"node list {text!r} has unbalanced brackets: expected names such as node[01-03,7],gpu1")
    return parts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise UserError(f"node list {text!r}: cannot read {part!r}; expected a number or a rising range, 01-03")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _slurm_nodes(env: Mapping[str, str]) -> int | None:
    """Nodes of the Slurm allocation, or None outside of one."""
    counts = {name: env[name] for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES") if env.get(name)}
    for name, value in counts.items():
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"{name}={value!r} is no number of nodes: unset it outside Slurm")
    # Inside a job step SLURM_NNODES counts the step's nodes and SLURM_JOB_NUM_NODES the job's: the job is asked for.
    return int(next(iter(counts.values()))) if counts else None


def _slurm_gpus(env: Mapping[str, str]) -> int | None:
    """GPUs that Slurm gave each node, or None where it does not say. Forms: "8", "h100:8", "gpu:h100:8"."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        match = re.fullmatch(r"(?:[^,]*:)?([1-9]\d*)", env.get(name, ""))
        if match:
            return int(match[1])
    return None


def _rendezvous(env: Mapping[str, str], allocated: int | None) -> list[str]:
    job_id = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    nodelist = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if allocated is not None and nodelist:
        hosts = expand_nodelist(nodelist)
        if len(hosts) < allocated:
            raise UserError(f"Slurm says {allocated} nodes but its node list {nodelist!r} names {len(hosts)}")
        host = hosts[0]
    elif env.get("MASTER_ADDR"):
        host = env["MASTER_ADDR"]
    else:
        missing = "SLURM_JOB_NODELIST" if allocated is not None else "MASTER_ADDR"
        raise UserError(f"several nodes need a place to meet: set {missing} (MASTER_ADDR=HOST of the first node)")
    port = env.get("MASTER_PORT") or str(rendezvous_port(job_id))
    return ["--rdzv-id", job_id or "functitan", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
