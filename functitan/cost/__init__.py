"""What a captured step costs, without running it: collectives, floating-point operations, memory.

    with cost.fake_group(plan.mesh.size):
        captured = ft.jit(step, plan, donate=("state",)).lower(abstract_state, abstract_batch)
        print(cost.explain(captured, plan))
"""

from functitan.cost.collectives import Collective, CollectiveCount
from functitan.cost.depth import NotRegularError, extrapolate
from functitan.cost.facts import Fact, Facts, graph_facts
from functitan.cost.groups import axes_of, fake_group
from functitan.cost.memory import Memory, timeline
from functitan.cost.parts import PARTS, parts_of, phases_of
from functitan.cost.pipeline import pipeline_of
from functitan.cost.report import Explanation, ParamRow, explain, facts_of, params_of, summarize

__all__ = [
    "PARTS",
    "Collective",
    "CollectiveCount",
    "Explanation",
    "Fact",
    "Facts",
    "Memory",
    "NotRegularError",
    "ParamRow",
    "axes_of",
    "explain",
    "extrapolate",
    "graph_facts",
    "facts_of",
    "fake_group",
    "params_of",
    "parts_of",
    "phases_of",
    "pipeline_of",
    "summarize",
    "timeline",
]
