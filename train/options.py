"""The options of a run on the command line: ``[RECIPE] [--config FILE] [--train.steps 20 …]``, parsed by tyro."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import attrs
import tyro
from attrs import frozen

from train import config as configs
from train import recipes
from train.config import RunConfig
from train.config_text import ConfigError
from train.errors import UserError

T = TypeVar("T", bound="TrainOptions | CheckOptions | LaunchOptions")
RecipeName = Literal[tuple(recipes.RECIPES)]  # type: ignore[valid-type]


@frozen
class RunOptions:
    """A recipe or a file, and what is changed in it."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    recipe: tyro.conf.Positional[RecipeName] = recipes.DEFAULT
    """Where the values come from that no option gives."""
    config: Path | None = None
    """A file of complete configuration, such as config.yaml of a run's folder, in place of a recipe."""


@frozen
class TrainOptions:
    """A run, and on how many ranks."""

    job: Annotated[RunOptions, tyro.conf.arg(name="")]
    nproc: int | None = None
    """Ranks to start on this machine, one a device. None: this process alone, or what torchrun has started."""


@frozen
class CheckOptions:
    """A run, and what it is to be checked against."""

    job: Annotated[RunOptions, tyro.conf.arg(name="")]
    devices: int | None = None
    """How many devices will run it. None: WORLD_SIZE where that is set, else the mesh is not held against a number."""


@frozen
class LaunchOptions:
    """A run, and the machines to start it on."""

    job: Annotated[RunOptions, tyro.conf.arg(name="")]
    nnodes: int | None = None
    """Machines. None: those of the Slurm allocation, or 1."""
    nproc: int | None = None
    """Processes on each machine, one a device. None: the GPUs that Slurm gave each node, or all that torchrun finds."""


def parse_train(args: Sequence[str]) -> TrainOptions:
    """What ``[RECIPE] [--config FILE] [OPTIONS]`` describes. Options win over the file or recipe.

    Raises:
        ConfigError: a file that cannot be read or holds no configuration, a recipe beside a file, an illegal value.
        SystemExit: from tyro, after help (status 0) or an option or value that it refuses (status 2).
    """
    return parse(TrainOptions, args, "functitan train", "Train a language model. Run the same command again to go on.")


def parse_check(args: Sequence[str]) -> CheckOptions:
    """As :func:`parse_train`, for ``functitan check``."""
    return parse(CheckOptions, args, "functitan check", "Say everything that is wrong with a run. Runs nothing.")


def parse_launch(args: Sequence[str]) -> LaunchOptions:
    """As :func:`parse_train`, for ``functitan launch``."""
    text = "Print the line that starts a run on every device of this machine or Slurm allocation. Starts nothing."
    return parse(LaunchOptions, args, "functitan launch", text)


def raise_problems(problems: Sequence[str]) -> None:
    """Raises a :class:`ConfigError` with the problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def world_size(env: Mapping[str, str]) -> int | None:
    """The number of ranks that torchrun started (WORLD_SIZE), or None where nothing did.

    Raises:
        ConfigError: WORLD_SIZE is no positive number.
    """
    text = env.get("WORLD_SIZE")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"WORLD_SIZE={text!r} is no number of ranks: torchrun sets it; unset it to run alone"])
    return int(text)


def parse(cls: type[T], args: Sequence[str], prog: str, text: str) -> T:
    """The options of a command whose class has a field ``job``, a :class:`RunOptions`, or is that.

    Parses twice where need be: options are laid over a base, and the base is itself named by the arguments. A first
    word that is no option is the recipe, so that ``functitan train small --help`` shows that one's values. Where tyro
    then reads another base (``--config``, a recipe after the options), its answer decides.

    Raises:
        ConfigError: as :func:`parse_train`.
        SystemExit: from tyro, after help (status 0) or an option or value that it refuses (status 2).
    """
    recipe = args[0] if args and not args[0].startswith("-") else recipes.DEFAULT
    options = _tyro(cls, args, prog, text, cls(RunOptions(recipes.recipe(recipe), recipe)))
    read = options.job
    if read.config is not None and (read.recipe != recipes.DEFAULT or read.recipe in args[:1]):
        raise ConfigError([f"give the recipe {read.recipe} or --config {read.config}, not both: each is complete"])
    if read.config is not None:
        run = configs.parse(_read(read.config), str(read.config))
    elif read.recipe != recipe:
        run = recipes.recipe(read.recipe)
    else:
        return options
    return _tyro(cls, args, prog, text, cls(attrs.evolve(read, run=run)))


def _tyro(cls: type[T], args: Sequence[str], prog: str, text: str, default: T) -> T:
    table = [f"  {name.ljust(12)} {recipe.summary}" for name, recipe in recipes.RECIPES.items()]
    text = "\n".join([text, "", "Recipes:", *table])
    try:
        with _said_once() if os.environ.get("WORLD_SIZE", "1") != "1" else contextlib.nullcontext():
            return tyro.cli(
                cls,
                prog=prog,
                description=text,
                args=list(args),
                default=default,
                config=(tyro.conf.AvoidSubcommands,),  # a part that the base leaves out (None) is no subcommand
            )
    except UserError as error:  # from the validator of a field
        raise ConfigError([str(error)]) from error


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """What is printed before the process ends, help or a mistake, comes only from the first rank that says it."""
    from train.distributed import first_to_say  # which builds on this module

    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            yield
    except SystemExit:
        if first_to_say(out.getvalue() + errors.getvalue()):
            sys.stdout.write(out.getvalue())
            sys.stderr.write(errors.getvalue())
        raise


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror}: give a config.yaml that a run wrote"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: not UTF-8 text: give a config.yaml that a run wrote"]) from error
