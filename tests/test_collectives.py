"""What a step sends, counted in its graph and compared with what the theory says: no call more, and no byte.

The graphs are those of rank 0 of a fake process group. Sizes are bytes of what rank 0 puts into one call.
"""

import functools
from collections import Counter

import attrs
import pytest

import functitan as ft
from functitan import cost, optim
from functitan.compiler.collectives import collectives, is_backward
from functitan.cost.groups import axes_of, group_ranks
from models import llama
from sharding_specs import PRESETS, MeshSpec
from train.step import make_train_step

BATCH, SEQ = 16, 16
MODEL = llama.LlamaConfig(vocab_size=67, dim=32, n_heads=16, n_kv_heads=8, head_dim=4, hidden_dim=48)
FLOAT, INT64 = 4, 8


def captured(mesh, layers=2, *, sequence_parallel=True, remat="none", accumulation=1, change=lambda apply: apply):
    """The calls of the captured step: Counter of ``(kind, axis, phase, bytes)``."""
    model = attrs.evolve(MODEL, n_layers=layers)
    params = llama.declare(model)
    rules = PRESETS["all"] if sequence_parallel else PRESETS["all"].replace(seq="cp")
    with cost.fake_group(mesh.size):
        plan = ft.compile_specs(params, rules, mesh)
        rule = optim.adamw(1e-3, mask=optim.decay_mask(params))
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), rule)
        apply = change(functools.partial(llama.apply, cfg=model, remat=remat))
        step = ft.jit(make_train_step(apply, optimizer, lambda step: 1e-3, accumulation), plan, donate=("state",))
        batch = ft.abstract_batch(plan, ["tokens", "labels", "positions", "documents"], BATCH, SEQ)
        graph = step.lower(ft.abstract_state(plan, optimizer), batch).graph.graph
        return Counter(map(functools.partial(call_of, mesh=mesh), collectives(graph)))


def call_of(node, mesh):
    kind = node.target.overloadpacket.__name__.removesuffix("_tensor").removesuffix("_into")
    (axis,) = axes_of(group_ranks(node.args[-1]), mesh)
    sent = node.args[0].meta["val"]
    return kind, axis, "backward" if is_backward(node) else "forward", sent.numel() * sent.element_size()


def expected(mesh, layers=2, *, sequence_parallel=True, remat="none", accumulation=1):
    """The same from the theory, where every axis of the mesh is one of dp, fsdp and tp."""
    parts = [
        parameters(mesh, layers),
        activations(mesh, layers, sequence_parallel, remat, accumulation),
        loss(mesh, accumulation),
    ]
    if sequence_parallel:
        parts.append(norm_weights(mesh, layers))
    total = Counter()
    for part in parts:
        total.update({call: count * accumulation for call, count in part.items()})
    total.update(gradient_norm(mesh))
    return total


def buckets(mesh):
    """Elements of what is gathered together, whole over fsdp, on a rank of tp: the embedding, a layer, the rest."""
    D, H, KV, F = MODEL.dim, MODEL.n_heads * MODEL.head_dim, MODEL.n_kv_heads * MODEL.head_dim, MODEL.hidden_dim
    tp = mesh.get("tp", 1)
    vocab = -(-MODEL.vocab_size // tp)  # rank 0 holds one of the larger parts
    return {"embed": vocab * D, "layer": (2 * D * H + 2 * D * KV + 3 * D * F) // tp + 2 * D, "last": D + D * vocab}


def parameters(mesh, layers):
    """Gathers over fsdp, and reductions of gradients over fsdp and dp: one a bucket.

    The norm and the output projection are used last in forward and first in backward, and kept in between; the
    embedding is not read in backward.
    """
    calls = Counter()
    fsdp = mesh.get("fsdp", 1)
    for name, elements in buckets(mesh).items():
        count = layers if name == "layer" else 1
        if fsdp > 1:
            calls["all_gather", "fsdp", "forward", FLOAT * elements // fsdp] += count
            calls["all_gather", "fsdp", "backward", FLOAT * elements // fsdp] += layers if name == "layer" else 0
            calls["reduce_scatter", "fsdp", "backward", FLOAT * elements] += count
        if "dp" in mesh:
            calls["all_reduce", "dp", "backward", FLOAT * elements // fsdp] += count
    return +calls


def activations(mesh, layers, sequence_parallel, remat, accumulation):
    """Over tp, of activations [batch, seq, embed]: around attention, the MLP, the embedding and the output projection.

    A remat computes a layer again up to its last product, whose sum over tp nothing in backward needs.
    """
    if "tp" not in mesh:
        return Counter()
    rows = BATCH // mesh.get("dp", 1) // mesh.get("fsdp", 1) // accumulation
    whole = FLOAT * rows * SEQ * MODEL.dim
    blocks = 2 * layers
    if not sequence_parallel:
        again = layers if remat == "full" else 0
        return Counter({
            ("all_reduce", "tp", "forward", whole): blocks + 1,  # behind each block, and the embedding
            ("all_reduce", "tp", "backward", whole): blocks + 1 + again,  # before each block, and the projection
        })  # fmt: skip
    part = whole // mesh["tp"]
    gathers_again, scatters_again = (2 * layers, layers) if remat == "full" else (0, 0)
    return Counter({
        ("all_gather", "tp", "forward", part): blocks + 1,
        ("reduce_scatter", "tp", "forward", whole): blocks + 1,
        ("all_gather", "tp", "backward", part): blocks + 1 + gathers_again,
        ("reduce_scatter", "tp", "backward", whole): blocks + 1 + scatters_again,
    })  # fmt: skip


def norm_weights(mesh, layers):
    """Gradients of norm weights under sequence parallelism: every rank of tp has seen other tokens."""
    if "tp" not in mesh:
        return Counter()
    held = FLOAT * MODEL.dim // mesh.get("fsdp", 1)
    return Counter({
        ("all_reduce", "tp", "backward", 2 * held): layers,
        ("all_reduce", "tp", "backward", held): 1,
    })  # fmt: skip


def loss(mesh, accumulation):
    """Two numbers over the axes that split the batch; three for every token over those that split the vocabulary."""
    calls = Counter()
    for axis in {"dp", "fsdp"} & set(mesh):
        calls["all_reduce", axis, "forward", FLOAT] += 1
        calls["all_reduce", axis, "forward", INT64] += 1
    if "tp" in mesh:
        tokens = BATCH // mesh.get("dp", 1) // mesh.get("fsdp", 1) // accumulation * SEQ
        calls["all_reduce", "tp", "forward", FLOAT * tokens] += 1
        calls["all_reduce", "tp", "forward", 2 * FLOAT * tokens] += 1
    return calls


def gradient_norm(mesh):
    """Once an axis that splits anything: a number for each way in which parameters are split over it."""
    calls = Counter()
    if "fsdp" in mesh:
        calls["all_reduce", "fsdp", "forward", FLOAT * (2 if "tp" in mesh else 1)] += 1
    if "tp" in mesh:
        calls["all_reduce", "tp", "forward", FLOAT] += 1
    return calls


def differences(found, wanted):
    """What is there and not wanted, and what is wanted and not there: a line each."""
    return [
        f"{title}: {count} x {kind} over {axis} in {phase}, {size} bytes"
        for title, calls in (("unexpected", found - wanted), ("missing", wanted - found))
        for (kind, axis, phase, size), count in sorted(calls.items())
    ]


def compare(found, wanted):
    problems = differences(found, wanted)
    if problems:
        pytest.fail("\n".join(["the step does not send what it should", *problems]))


class TestCounts:
    @pytest.mark.parametrize("layers", [2, 3])
    @pytest.mark.parametrize(
        "mesh",
        [MeshSpec(fsdp=8), MeshSpec(dp=4), MeshSpec(dp=2, fsdp=4), MeshSpec(tp=2), MeshSpec(fsdp=2, tp=2)],
        ids=str,
    )
    def test_are_those_of_the_theory(self, mesh, layers):
        compare(captured(mesh, layers), expected(mesh, layers))

    @pytest.mark.parametrize("mesh", [MeshSpec(dp=2, tp=2), MeshSpec(dp=2, fsdp=2, tp=4)], ids=str)
    def test_of_replicas_of_tensor_parallel_ranks(self, mesh):
        compare(captured(mesh), expected(mesh))

    @pytest.mark.parametrize("layers", [2, 3])
    def test_without_sequence_parallelism(self, layers):
        mesh, options = MeshSpec(tp=2), {"sequence_parallel": False}
        compare(captured(mesh, layers, **options), expected(mesh, layers, **options))

    @pytest.mark.parametrize("sequence_parallel", [True, False])
    def test_of_rematerialised_layers(self, sequence_parallel):
        mesh, options = MeshSpec(fsdp=2, tp=2), {"sequence_parallel": sequence_parallel, "remat": "full"}
        compare(captured(mesh, **options), expected(mesh, **options))

    @pytest.mark.parametrize("mesh", [MeshSpec(tp=2), MeshSpec(dp=4), MeshSpec(fsdp=2, tp=2)], ids=str)
    def test_of_two_microbatches_are_twice_those_of_one(self, mesh):
        compare(captured(mesh, accumulation=2), expected(mesh, accumulation=2))

    def test_of_one_device_are_none(self):
        assert not captured(MeshSpec())


class TestWhatIsUnexpected:
    def test_is_named(self):
        """One layout that the model does not want, and the logits are gathered."""

        def astray(apply):
            def logits(params, batch, *, key=None):
                return ft.constrain(apply(params, batch, key=key), ("batch", None, None))

            return logits

        mesh = MeshSpec(tp=2)
        found = differences(captured(mesh, change=astray), expected(mesh))
        padded = -(-MODEL.vocab_size // 2)
        assert f"unexpected: 1 x all_gather over tp in forward, {FLOAT * BATCH * SEQ * padded} bytes" in found

    def test_and_what_is_missing(self):
        call = ("all_reduce", "dp", "backward", 12)
        assert differences(Counter({call: 1}), Counter({call: 3})) == [
            "missing: 2 x all_reduce over dp in backward, 12 bytes"
        ]
