"""Captured train steps, and the memory that a graph takes when it runs."""

import functools

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functitan as ft
from functitan import optim
from functitan.compiler import passes
from models import llama
from sharding_specs import PRESETS, MeshSpec
from train.step import make_train_step

BATCH, SEQ = 8, 64
CONFIG = attrs.evolve(llama.SIZES["debug"], n_layers=2)


def captured_step(
    mesh=MeshSpec(), cfg=CONFIG, *, remat="none", accumulation=1, donate=("state",), names=passes.DEFAULT,  # noqa: B008
    schedule=None, rows=BATCH,
):  # fmt: skip
    """``(captured, plan)`` of a train step of Llama with AdamW and clipping, for a batch [8, 64].

    With ``schedule``: through a pipeline, ``accumulation`` microbatches at a time.
    """
    params = llama.declare(cfg)
    pipeline = schedule and ft.make_pipeline(params, PRESETS["all"], mesh, schedule, accumulation)
    plan = ft.compile_specs(params, PRESETS["all"], mesh, pipeline=pipeline)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, mask=optim.decay_mask(params)))
    model = functools.partial(llama.apply, cfg=cfg, remat=remat)
    step = ft.jit(make_train_step(model, optimizer, lambda step: 1e-3, accumulation), plan, donate=donate, passes=names)
    batch = ft.abstract_batch(plan, ["tokens", "labels", "positions", "documents"], rows, SEQ)
    return step.lower(ft.abstract_state(plan, optimizer), batch), plan


class LiveBytes(TorchDispatchMode):
    """Notes after each operator how many bytes of storage are alive, of those that it has seen.

    ``log``: ``(operator, bytes)``. What a collective but an all-reduce reads is held until the wait for its result, as
    a real process group holds it (a fake one lets it go).
    """

    def __init__(self, tensors):
        super().__init__()
        self.alive, self.held, self.log = {}, {}, []
        self.see(tensors)
        self.start = self.total()

    def see(self, tensors):
        for x in tree_leaves(tensors):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def total(self):
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        return sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see((args, kwargs, out))
        self.log.append((str(func), self.total()))
        if "wait_tensor" in str(func):
            self.held.pop(out.data_ptr(), None)
        elif "c10d" in str(func) and isinstance(out, torch.Tensor) and "all_reduce" not in str(func):
            self.held[out.data_ptr()] = args
        return out


def run_and_watch(captured):
    """Runs a captured graph on zeros; returns the LiveBytes that watched it."""
    nodes = list(captured.graph.graph.nodes)
    fakes = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    inputs = [torch.zeros(fake.shape, dtype=fake.dtype) for fake in fakes]
    constants = [getattr(captured.graph, node.target) for node in nodes if node.op == "get_attr"]
    kept = [x for i, x in enumerate(inputs) if i not in captured.donated]
    watch = LiveBytes((inputs, constants))
    with watch, torch.no_grad():
        results = captured.run(inputs)
    del kept, results
    return watch
