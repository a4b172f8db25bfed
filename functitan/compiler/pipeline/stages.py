"""Which rank runs which layers: the part of a Plan that says how a model is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from functitan import tree
from functitan.compiler.pipeline.actions import UNIT_TIMES
from functitan.compiler.pipeline.schedules import (
    Schedule,
    fewest_microbatches,
    is_file,
    legal_microbatches,
    make_schedule,
    stages_per_rank_of,
)
from functitan.compiler.pipeline.timeline import Timeline, simulate
from sharding_specs import MeshSpec, Param, Problem, Rules, SpecError
from sharding_specs.partition import entry_axes
from sharding_specs.stages import balanced_stages, listed_stages, stage_layers

PP = "pp"
FLOPS_PER_WEIGHT = 6
"""Of a token, forward and backward: one multiply-add forward and two backward (Kaplan et al., 2020,
https://arxiv.org/abs/2001.08361, section 2.1)."""

_T = TypeVar("_T")


def _pairs(pairs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((pair.start, pair.stop) if isinstance(pair, range) else tuple(pair) for pair in pairs)


@frozen
class Pipeline:
    """The stages of a pipeline; made by :func:`make_pipeline`. ``print(pipeline)`` is a table.

    ``attrs.asdict`` of one is what JSON can hold, and ``Pipeline(**data)`` reads it.

    Attributes:
      schedule: a name of functitan.compiler.pipeline.schedules.SCHEDULES, or the path of a .csv file.
      microbatches: parts that a batch is taken in.
      stages_per_rank: as many on every rank.
      layers: ``(start, stop)`` of each stage. The first one has the embedding as well, the last one the head.
      stage_ranks: which rank of the axis pp runs each stage.
      parameters: of each stage, how many elements; tied embeddings are counted in the first and in the last. Empty
        where they are not known.
      flops: of each stage, operations a token, forward and backward, of products with parameters. Empty as above.

    Raises:
      ValueError: the stages and the ranks do not fit each other, or a layer is missing.
    """

    schedule: str
    microbatches: int
    stages_per_rank: int
    layers: tuple[tuple[int, int], ...] = field(converter=_pairs)
    stage_ranks: tuple[int, ...] = field(converter=tuple)
    parameters: tuple[int, ...] = field(default=(), converter=tuple)
    flops: tuple[int, ...] = field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        stages = len(self.layers)
        if not stages or len(self.stage_ranks) != stages:
            raise ValueError(f"{stages} stages have the ranks {self.stage_ranks}; legal: one rank a stage")
        counts = {rank: self.stage_ranks.count(rank) for rank in range(max(self.stage_ranks) + 1)}
        if set(counts.values()) != {self.stages_per_rank} or min(self.stage_ranks) < 0:
            raise ValueError(f"stages on the ranks {self.stage_ranks}; legal: {self.stages_per_rank} on each from 0 on")
        starts = (0, *(stop for _, stop in self.layers[:-1]))
        if any(start != expected or stop <= start for (start, stop), expected in zip(self.layers, starts)):
            raise ValueError(f"stages with the layers {self.layers}; legal: each begins where the one before stops")
        for name in ("parameters", "flops"):
            if len(getattr(self, name)) not in (0, stages):
                raise ValueError(f"{name} {getattr(self, name)} of {stages} stages; legal: one number a stage, or none")

    @property
    def ranks(self) -> int:
        """The size of the mesh axis pp."""
        return len(self.stage_ranks) // self.stages_per_rank

    @property
    def n_layers(self) -> int:
        return self.layers[-1][1]

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending. Raises ValueError where there is no such rank."""
        if not 0 <= pp_rank < self.ranks:
            raise ValueError(f"the pipeline has no rank {pp_rank}; legal: 0 to {self.ranks - 1}")
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank)

    def layers_of(self, pp_rank: int) -> tuple[int, ...]:
        """The layers of a rank, in the order in which it holds them: stage by stage. Raises ValueError as above."""
        return tuple(layer for stage in self.stages_of(pp_rank) for layer in range(*self.layers[stage]))

    def actions(self) -> Schedule:
        """The order in which its ranks run the stages.

        Raises:
          OSError: the schedule is of a file that is gone; ValueError: it has been changed into one that does not fit.
        """
        return make_schedule(self.schedule, self.ranks, self.microbatches, self.stages_per_rank)

    def timeline(self, *, by_flops: bool = False) -> Timeline:
        """Who does what when, with a backward pass that takes twice its forward pass, and sends that take no time.

        Args:
          by_flops: a stage takes as long as it has operations, beside the mean of all; else all stages take the same.

        Raises:
          OSError, ValueError: as of :meth:`actions`; ValueError where the operations are not known.
        """
        schedule = self.actions()
        if not by_flops:
            return simulate(schedule)
        if not self.flops:
            raise ValueError("the operations of the stages are not known: make the pipeline by make_pipeline")
        mean = sum(self.flops) / len(self.flops)
        return simulate(schedule, {kind: [time * n / mean for n in self.flops] for kind, time in UNIT_TIMES.items()})

    def __str__(self) -> str:
        rows = [("stage", "rank", "layers", "count", "beside them", "parameters", "flops a token")]
        for stage, (start, stop) in enumerate(self.layers):
            span = str(start) if stop == start + 1 else f"{start} to {stop - 1}"
            figures = [f"{figure[stage]:,}" if figure else "-" for figure in (self.parameters, self.flops)]
            rank = str(self.stage_ranks[stage])
            rows.append((str(stage), rank, span, str(stop - start), self._beside(stage), *figures))
        widths = [max(map(len, column)) for column in zip(*rows)]
        words = ("layers", "beside them")
        align = [str.ljust if title in words else str.rjust for title in rows[0]]
        lines = ["  ".join(put(cell, width) for put, cell, width in zip(align, row, widths)) for row in rows]
        head = (
            f"{self.schedule}: {self.n_layers} layers in {len(self.layers)} stages on {self.ranks} ranks, "
            f"{self.microbatches} microbatches"
        )
        return "\n".join([head, *lines])

    def _beside(self, stage: int) -> str:
        names = ("embedding", "head")
        has = (stage == 0, stage == len(self.layers) - 1)
        return ", ".join(name for name, here in zip(names, has) if here) or "-"


def make_pipeline(
    params: Any,
    rules: Rules,
    mesh: MeshSpec,
    schedule: str = "1F1B",
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    split: str | Sequence[int] = "auto",
) -> Pipeline:
    """Divides the layers of a model among the stages of a schedule over the mesh axis pp.

    Args:
      params: a tree of Param; the dim "layers", which comes first, says how many layers there are.
      rules: logical name -> mesh axes; "layers" must be over pp.
      mesh: with every size known.
      schedule: see :func:`functitan.compiler.pipeline.schedules.make_schedule`.
      microbatches: None takes the fewest that the schedule works with, at least two a rank; of a file, its own.
      stages_per_rank: None is what the schedule wants.
      split: "auto" makes the dearest stage as cheap as it can be, by operations and then by bytes, with the embedding
        (bytes alone: a lookup multiplies nothing) and the head counted; "equal" gives stages that are at most one
        layer apart; or the number of layers of each stage: ``"2,1,1,1"``, ``(2, 1, 1, 1)``. Of experts all are
        counted.

    Raises:
      SpecError: something cannot work; a ValueError with the legal values.
    """
    ranks = mesh.get(PP, 1)
    n_layers = _count_layers(params)
    _check_rule(rules, ranks)
    each = _or_problem("pipeline/schedule", lambda: stages_per_rank_of(schedule, stages_per_rank))
    _check_enough(n_layers, ranks, each)

    def order() -> Schedule:
        count = fewest_microbatches(schedule, ranks, each) if microbatches is None else microbatches
        return make_schedule(schedule, ranks, count, each)

    # Whatever else can be wrong with a schedule known by its name was found above.
    at_fault = "schedule" if microbatches is None or is_file(schedule) else "microbatches"
    made = _or_problem(f"pipeline/{at_fault}", order)
    costs = _Costs.of(params)
    layers = _or_problem("pipeline/layers", lambda: _split(split, n_layers, made.stages, costs))
    return Pipeline(
        schedule, made.microbatches, each, layers, made.stage_ranks,
        costs.over(layers, "parameters"), costs.over(layers, "flops"),
    )  # fmt: skip


def check_pipeline(pipeline: Pipeline, params: Any, rules: Rules, mesh: MeshSpec) -> None:
    """Checks that a pipeline is one of this model on this mesh.

    Raises:
      SpecError: it has another number of layers or ranks, its stages are not where its schedule has them, or the rules
        do not put the layers over pp; a ValueError with what is legal.
    """
    ranks, n_layers = mesh.get(PP, 1), _count_layers(params)
    _check_rule(rules, ranks)
    if pipeline.ranks != ranks:
        raise SpecError([Problem(f"mesh/{PP}", f"a pipeline of {pipeline.ranks} ranks on {PP}={ranks}", PP,
                                 (pipeline.ranks,), "make the pipeline for this mesh")])  # fmt: skip
    if pipeline.n_layers != n_layers:
        message = f"a pipeline of {pipeline.n_layers} layers for a model of {n_layers}"
        hint = "make the pipeline for this model"
        raise SpecError([Problem("pipeline/layers", message, "layers", (n_layers,), hint)])
    made = _or_problem("pipeline/schedule", lambda: make_schedule(
        pipeline.schedule, ranks, pipeline.microbatches, pipeline.stages_per_rank))  # fmt: skip
    if made.stage_ranks != pipeline.stage_ranks:
        message = f"{pipeline.schedule} has its stages on the ranks {made.stage_ranks}, not {pipeline.stage_ranks}"
        raise SpecError([Problem("pipeline/stage_ranks", message, hint="make the pipeline with make_pipeline")])


def check_rows(pipeline: Pipeline, rows: int) -> None:
    """Checks that a batch of so many rows can be taken in the pipeline's microbatches.

    Raises:
      SpecError: it does not divide; a ValueError with the numbers of microbatches that the schedule takes and that do.
    """
    if rows >= 1 and rows % pipeline.microbatches == 0:
        return
    taken = legal_microbatches(pipeline.schedule, pipeline.ranks, pipeline.stages_per_rank, rows)
    legal = tuple(count for count in taken if rows % count == 0)
    count = pipeline.microbatches
    hint = f"or a batch of a multiple of {count} rows"
    if not legal:
        hint = f"no number works for {pipeline.schedule} over {PP}={pipeline.ranks}; take a multiple of {count} rows"
    raise SpecError([
        Problem("pipeline/microbatches", f"a batch of {rows} rows does not divide into {count} microbatches",
                "microbatches", legal, hint)
    ])  # fmt: skip


@frozen
class _Costs:
    """What the layers, and what stands before and after them, hold and compute: parameters, bytes, flops a token."""

    layer: Mapping[str, int]
    first: Mapping[str, int]
    last: Mapping[str, int]
    n_layers: int

    @staticmethod
    def of(params: Any) -> _Costs:
        """Of a tree of Param. ``("vocab", …)`` is looked up, ``(…, "vocab")`` multiplied with, as in nn.

        Where there is none of the second kind, the last one of the first kind is the head as well: the one table of
        tied embeddings. What has neither "layers" nor "vocab" is taken to stand with the head, as a final norm does.
        """
        leaves = tree.leaves(params)
        stacked = [param for param in leaves if "layers" in param.names]
        tables = [param for param in leaves if param.names[:1] == ("vocab",)]
        others = [param for param in leaves if "layers" not in param.names and param not in tables]
        heads = [param for param in others if "vocab" in param.names]
        if tables and not heads:
            heads = tables[-1:]
            tables = tables[:-1] or tables
        rest = [param for param in others if "vocab" not in param.names]
        n_layers = stacked[0].shape[0]
        return _Costs(_sum(stacked, True), _sum(tables, False), _sum(heads + rest, True), n_layers)

    def over(self, layers: Sequence[range], what: str) -> tuple[int, ...]:
        """Of each stage, one of the numbers."""
        each = self.layer[what] // self.n_layers
        stages = [each * len(own) for own in layers]
        stages[0] += self.first[what]
        stages[-1] += self.last[what]
        return tuple(stages)


def _sum(params: Sequence[Param], multiplied: bool) -> dict[str, int]:
    matrices = [param for param in params if sum(name != "layers" for name in param.names) >= 2]
    return {
        "parameters": sum(param.size for param in params),
        "bytes": sum(param.bytes for param in params),
        "flops": FLOPS_PER_WEIGHT * sum(param.size for param in matrices) if multiplied else 0,
    }


def _count_layers(params: Any) -> int:
    """The number of layers. Raises SpecError where there is none, or not one."""
    stacked = [(path, param) for path, param in tree.leaves_with_path(params) if "layers" in param.names]
    problems = [
        Problem(path or "params", f'the dim "layers" is dim {param.names.index("layers")}; it has to come first')
        for path, param in stacked
        if param.names[0] != "layers"
    ]
    if problems:
        raise SpecError(problems)
    counts = {param.shape[0]: path for path, param in stacked}
    if len(counts) == 1:
        return next(iter(counts))
    found = " and ".join(f"{count} ({path})" for count, path in sorted(counts.items()))
    message = f"the parameters have {found} layers" if counts else 'no parameter has a dim "layers"'
    hint = 'a pipeline cuts one stack: give its parameters a first dim "layers" of one size'
    raise SpecError([Problem("params", message, hint=hint)])


def _check_rule(rules: Rules, ranks: int) -> None:
    if ranks > 1 and PP not in entry_axes(rules["layers"] if "layers" in rules else None):
        has = rules["layers"] if "layers" in rules else "no rule"
        message = f'a pipeline over {PP}={ranks} needs the layers over "{PP}"; they have {has!r}'
        raise SpecError([Problem("rules/layers", message, hint='take Rules(…, layers="pp")')])


def _check_enough(n_layers: int, ranks: int, stages_per_rank: int) -> None:
    stages = ranks * stages_per_rank
    if stages <= n_layers:
        return
    each = f" with {stages_per_rank} stages a rank" if stages_per_rank > 1 else ""
    legal = tuple(range(1, n_layers // stages_per_rank + 1))
    hint = f"{PP} x stages a rank may be at most {n_layers}, since each stage needs a layer"
    message = f"{n_layers} layers cannot fill the {stages} stages of {PP}={ranks}{each}"
    raise SpecError([Problem(f"mesh/{PP}", message, PP, legal, hint)])


def _split(split: str | Sequence[int], n_layers: int, n_stages: int, costs: _Costs) -> list[range]:
    if split == "equal":
        return stage_layers(n_layers, n_stages)
    if split != "auto":
        return listed_stages(split, n_layers, n_stages)
    kinds = ("flops", "bytes")
    each = tuple(costs.layer[kind] // n_layers for kind in kinds)
    first, last = (tuple(extra[kind] for kind in kinds) for extra in (costs.first, costs.last))
    return balanced_stages([each] * n_layers, n_stages, first=first, last=last)


def _or_problem(path: str, make: Callable[[], _T]) -> _T:
    """What ``make`` gives, its ValueError being a problem at ``path``."""
    try:
        return make()
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError([Problem(path, str(error))]) from None
