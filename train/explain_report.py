"""What ``functitan explain`` tells of the run as a whole beside what a rank's graph costs: context and stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from models import llama
from train.config import RunConfig

if TYPE_CHECKING:
    from functitan.compiler.plan import Plan
    from functitan.cost import Explanation
    from functitan.sharding.context.calls import Work


def run_facts(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Of the run as a whole, for JSON.

    ``batch_size``, ``seq_len``, ``accumulation``, ``layers``, ``precision``, ``remat``; ``model_flops`` of all ranks in
    a step, recomputation not counted; ``model_flops_per_rank``, which model flops utilisation divides by the seconds
    of a step and the peak of a device. ``context`` {method, layout, reason, scores [number], shares [number],
    imbalance}, by rank of cp, the scores of one row and one head, if its documents hid nothing; null without cp.
    ``pipeline`` {schedule, microbatches, stages_per_rank, layers [[start, stop]], stage_ranks [rank of pp], parameters
    [number], flops [of a token], bubble, bubble_by_flops, in_flight [microbatches, by rank of pp]}; null without pp.
    """
    train = config.train
    model_flops = llama.flops_per_token(config.model, train.seq_len) * train.batch_size * train.seq_len
    return {
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
        "accumulation": train.accumulation,
        "layers": config.model.n_layers,
        "precision": train.precision,
        "remat": train.remat,
        "model_flops": model_flops,
        "model_flops_per_rank": model_flops / plan.mesh.size,
        "context": _context_facts(config, plan),
        "pipeline": _pipeline_facts(plan),
    }


def report(config: RunConfig, plan: Plan, explanation: Explanation) -> str:
    """The explanation as text, with the basis of model flops utilisation (PaLM, Chowdhery et al., 2022, appendix B)."""
    facts = run_facts(config, plan)
    needed, done = facts["model_flops_per_rank"], explanation.total_flops
    each = "" if plan.pipeline is None else f" of {plan.pipeline.microbatches} microbatches"
    lines = [
        f"A step: {facts['batch_size']} sequences of {facts['seq_len']} tokens in {facts['accumulation']} parts{each}, "
        f"{facts['layers']} layers, {facts['precision']}, remat {facts['remat']}; kernels as on a CPU",
        "",
        *_pipeline_lines(plan, explanation.rank),
        str(explanation),
        "",
        *_context_lines(config, plan),
        f"Model FLOPs: {facts['model_flops']:.4g} in a step, {needed:.4g} on each rank; the graph does "
        f"{done / needed:.3f} times that",
        f"  model flops utilisation = {needed:.4g} / (seconds of a step x peak FLOP/s of a device)",
    ]
    if config.jit.inductor:
        lines.append("Inductor (jit.inductor) fuses operators beyond this: its peak memory differs.")
    return "\n".join(lines)


def _context_work(config: RunConfig, plan: Plan) -> Work | None:
    """What each rank of cp computes of the attention; None where the sequence is not split."""
    from functitan.sharding.context.calls import Pattern, work

    if plan.context is None:
        return None
    return work(plan.context, plan.mesh["cp"], config.train.seq_len, Pattern(causal=True, documents=True))


def _context_facts(config: RunConfig, plan: Plan) -> dict[str, Any] | None:
    found = _context_work(config, plan)
    if found is None:
        return None
    return {
        **attrs.asdict(found.context),
        "scores": list(found.scores),
        "shares": list(found.shares),
        "imbalance": found.imbalance,
    }


def _context_lines(config: RunConfig, plan: Plan) -> list[str]:
    found = _context_work(config, plan)
    if found is None:
        return []
    each = [f"{share:.1%}" for share in found.shares]
    shares = ", ".join(each if len(each) <= 8 else [*each[:4], "…", *each[-3:]])
    return [
        f"Context: attention over cp={len(each)} by {found.context}",
        f"  work of the ranks, if documents hid nothing: {shares}; the busiest has {found.imbalance:.2f} x the mean",
        "",
    ]


def _pipeline_facts(plan: Plan) -> dict[str, Any] | None:
    if plan.pipeline is None:
        return None
    equal, uneven = plan.pipeline.timeline(), plan.pipeline.timeline(by_flops=True)
    return {
        **attrs.asdict(plan.pipeline),
        "bubble": equal.bubble,
        "bubble_by_flops": uneven.bubble,
        "in_flight": list(equal.in_flight),
    }


def _pipeline_lines(plan: Plan, rank: int) -> list[str]:
    facts = _pipeline_facts(plan)
    if facts is None:
        return []
    here = plan.mesh.coordinate(rank)["pp"]
    stages = plan.pipeline.stages_of(here)
    mine = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    others = [str(other) for other in range(plan.mesh.size) if other != rank and _differ_in_pp_alone(plan, rank, other)]
    head, *table = str(plan.pipeline).splitlines()
    return [
        f"Pipeline by {head}",
        *(f"  {line}" for line in table),
        f"  bubble: ranks wait for {facts['bubble']:.1%} of the time of the pipeline if all stages take the same, for "
        f"{facts['bubble_by_flops']:.1%} if they take what their operations say",
        f"  microbatches in flight at most, by rank of pp: {' '.join(map(str, facts['in_flight']))}",
        f"  what follows is of rank {rank}, which runs {mine}; for others give --rank {', '.join(others)}",
        "",
    ]


def _differ_in_pp_alone(plan: Plan, rank: int, other: int) -> bool:
    a, b = plan.mesh.coordinate(rank), plan.mesh.coordinate(other)
    return {**a, "pp": 0} == {**b, "pp": 0}
