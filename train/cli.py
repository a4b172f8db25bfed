"""The command line: ``functitan train | sample | bench | explain | launch | check``.

The work is elsewhere and imported by the command that needs it, so that help and mistakes are answered at once.
Exit status: 0 good, 1 a run that failed, 2 a mistake in the options or the configuration, 130 Ctrl-C. A mistake is
reported in a line, without a traceback; an exception that is no :class:`UserError` is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import tyro
from attrs import frozen

from train.config_text import ConfigError, near
from train.errors import UserError
from train.launch import job_size, launch_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: the arguments after the program's name; by default those of the process.

    Raises:
        SystemExit: from tyro, after help (status 0) or a mistake that it reports itself (status 2).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except ConfigError as error:
        # Every rank of a job mostly finds the same problems: one reports them.
        if _first_to_say(str(error)):
            _say_problems(error)
        return 2
    except UserError as error:
        _say("error", str(error))
        return 1
    except BrokenPipeError:
        # Whoever read the output has stopped, as `head` does. Python would try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except OSError as error:
        # What no code nearer to it could say more about: a disk that is full, a name that is too long.
        where = f"{error.filename}: " if error.filename else ""
        _say("error", f"{where}{error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        print("functitan: interrupted", file=sys.stderr)
        return 130


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"functitan {metadata.version('functitan')}")
        return 0
    command, *rest = args
    if command not in COMMANDS:
        raise ConfigError([f"unknown command {command!r}{near(command, COMMANDS)}"])
    run, _ = COMMANDS[command]
    return run(rest)


def _usage() -> str:
    lines = [f"  {name.ljust(8)} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: functitan COMMAND [OPTIONS]", "", *lines, "", "functitan COMMAND --help says more."])


def _first_to_say(text: str) -> bool:
    if "WORLD_SIZE" not in os.environ:
        return True
    from train.distributed import first_to_say  # which loads torch

    return first_to_say(text)


def _say(kind: str, text: str) -> None:
    # A message of several lines (a list of problems) stays one block, each line of it marked.
    for line in text.splitlines():
        print(f"functitan: {kind}: {line}", file=sys.stderr)


def _say_problems(error: ConfigError) -> None:
    for problem in error.problems:
        _say("error", problem)


def _train(args: list[str]) -> int:
    from train import options
    from train.config import unsupported, validate

    parsed = options.parse_train(args)
    config, ranks = parsed.job.run, options.world_size(os.environ)
    if parsed.nproc is not None and ranks is not None:
        raise ConfigError([f"--nproc: is {parsed.nproc}, but {ranks} ranks are started already (WORLD_SIZE): give one"])
    if parsed.nproc is not None and parsed.nproc < 1:
        raise ConfigError([f"--nproc: is {parsed.nproc}; give 1 or more"])
    devices = parsed.nproc or ranks or 1
    mesh = config.mesh.spec()
    needed = math.prod(max(size, 1) for size in mesh.sizes)
    if parsed.nproc is None and ranks is None and needed > 1:
        more = f"mesh: {mesh.describe(mesh.axes)} needs {needed} ranks, and this is one process: add --nproc {needed}"
        options.raise_problems([*validate(config, needed), more])
    options.raise_problems(validate(config, devices))
    options.raise_problems(unsupported(config, devices))
    if devices > 1 and ranks is None:
        from train.spawn import run_ranks, this_program

        command = [*this_program(), "train", *_without(args, ("--nproc",))]
        return run_ranks(command, devices, config.train.timeout_s)
    from train import loop
    from train.distributed import FailedElsewhere

    try:
        return loop.run(config)
    except ConfigError as error:  # of the one rank that gets it
        _say_problems(error)
        return 2
    except FailedElsewhere as failed:  # which has said why
        return failed.status


def _check(args: list[str]) -> int:
    from train import options
    from train.config import unsupported, validate

    parsed = options.parse_check(args)
    if parsed.devices is not None and parsed.devices < 1:
        raise ConfigError([f"--devices: is {parsed.devices}; give 1 or more"])
    config, devices = parsed.job.run, parsed.devices or options.world_size(os.environ)
    options.raise_problems(validate(config, devices))
    mesh = config.mesh.spec()
    if devices is None and -1 not in mesh.sizes:
        devices = mesh.size
    refused = unsupported(config, devices) if devices is not None else []
    if refused:
        raise ConfigError([f"train refuses it: {problem}" for problem in refused])
    print("no problems found" + (f"; it needs {devices} ranks" if devices is not None and devices > 1 else ""))
    return 0


def _launch(args: list[str]) -> int:
    from train import options
    from train.config import unsupported, validate

    parsed = options.parse_launch(args)
    options.raise_problems(validate(parsed.job.run))
    line = launch_command(_without(args, ("--nnodes", "--nproc")), os.environ, parsed.nnodes, parsed.nproc)
    nodes, processes = job_size(os.environ, parsed.nnodes, parsed.nproc)
    if processes is not None:
        problems = validate(parsed.job.run, nodes * processes) or unsupported(parsed.job.run, nodes * processes)
        for problem in problems:
            _say("warning", problem)
    print(line)
    return 0


def _without(args: Sequence[str], names: tuple[str, ...]) -> list[str]:
    """The arguments less these options and their values."""
    kept, skip = [], False
    for arg in args:
        if skip:
            skip = False
        elif arg in names:
            skip = True
        elif not arg.startswith(tuple(f"{name}=" for name in names)):
            kept.append(arg)
    return kept


@frozen
class SampleOptions:
    """What to continue, with which checkpoint, and how freely."""

    folder: tyro.conf.Positional[Path]
    """Folder of a run."""
    prompt: str = "def "
    """The text to continue."""
    tokens: int = 256
    """How many tokens to add."""
    temperature: float = 0.8
    """Divides the logits: 0 takes the likeliest token each time, 1 samples the model's own distribution."""
    top_k: int | None = None
    """Sample among this many likeliest tokens only. None: among all."""
    seed: int = 0
    """Of the sampling: the same seed gives the same text."""
    step: int | None = None
    """The checkpoint of this step. None: the newest."""


def _sample(args: list[str]) -> int:
    parsed = tyro.cli(
        SampleOptions, prog="functitan sample", description="Continue a text with a trained model.", args=args
    )
    problems = [
        f"--{name.replace('_', '-')}: is {value}; give {legal}"
        for name, value, legal, good in (
            ("tokens", parsed.tokens, "1 or more", parsed.tokens >= 1),
            ("temperature", parsed.temperature, "0 or more", parsed.temperature >= 0),
            ("seed", parsed.seed, "0 to 2**32 - 1", 0 <= parsed.seed < 2**32),
            ("top_k", parsed.top_k, "1 or more, or None", parsed.top_k is None or parsed.top_k >= 1),
        )
        if not good
    ]
    if problems:
        raise ConfigError(problems)
    from train.sample import sample

    print(
        sample(
            parsed.folder,
            parsed.prompt,
            tokens=parsed.tokens,
            temperature=parsed.temperature,
            top_k=parsed.top_k,
            seed=parsed.seed,
            step=parsed.step,
        )
    )
    return 0


BENCHES = {
    "step": "time and memory of a train step",
    "shard": "the same on several ranks, against FSDP2",
    "long": "attention over long sequences on several ranks, against one rank and PyTorch's own",
    "pipeline": "a train step through stages, against torch.distributed.pipelining",
}


def _bench(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  {name.ljust(8)} {summary}" for name, summary in BENCHES.items()]
        print("\n".join([f"usage: functitan bench {{{','.join(BENCHES)}}} [OPTIONS]", "", *lines]))
        return 0 if args else 2
    if args[0] not in BENCHES:
        raise ConfigError([f"unknown bench {args[0]!r}{near(args[0], BENCHES)}"])
    bench = importlib.import_module(f"train.bench.{args[0]}")
    return bench.main(args[1:])


def _explain(args: list[str]) -> int:
    from train import explain

    return explain.main(args)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a model: a recipe, a file, or options"),
    "sample": (_sample, "continue a text with a trained model"),
    "bench": (_bench, "measure a train step against PyTorch and JAX"),
    "explain": (_explain, "say what each rank of a run holds, sends and computes, without running it"),
    "launch": (_launch, "print the line that starts a run on many devices"),
    "check": (_check, "say everything that is wrong with a run, without running it"),
}
