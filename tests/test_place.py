"""From a plan to tensors on a mesh, without ranks: a fake process group stands for the others."""

import psutil
import pytest
import torch

import functitan as ft
from functitan import cost, optim, random, tree
from functitan.compiler.plan import placements
from models import llama
from sharding_specs import PRESETS, MeshSpec, P

MESH = MeshSpec(dp=2, fsdp=2, tp=2)
CFG = llama.LlamaConfig(vocab_size=67, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48)


def test_a_rank_makes_its_share_of_a_large_model_and_no_more():
    plan = ft.compile_specs(llama.declare(llama.SIZES["8B"]), PRESETS["all"], MeshSpec(fsdp=64, tp=8))
    optimizer = optim.adamw(1e-3)
    with cost.fake_group(512):
        process = psutil.Process()
        before = process.memory_info().rss
        state = ft.init_state(plan, random.key(0), optimizer)
        grown = process.memory_info().rss - before
        held = sum(x.to_local().untyped_storage().nbytes() for x in tree.leaves(state))
        whole = [x.shape for x in tree.leaves(state.params)]
    assert whole == [param.shape for param in tree.leaves(plan.params)]
    share = sum(plan.shard_bytes(path) for path in plan.specs)
    assert 3 * share <= held < 3 * share + 1000
    assert held < 200e6 < plan.param_bytes / 100
    assert grown < 2 * held  # and on the way there nothing larger was made


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_shards_are_the_slices_of_the_whole(rank):
    plan = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MESH)
    one = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MeshSpec())
    whole = dict(tree.leaves_with_path(ft.init_params(one, random.key(3))))
    with cost.fake_group(8, rank):
        for path, x in tree.leaves_with_path(ft.init_params(plan, random.key(3))):
            part = whole[path][tuple(slice(start, start + size) for start, size in plan.region(path, rank))]
            assert torch.equal(x.to_local(), part), path
            assert x.shape == whole[path].shape and x.placements == placements(plan.specs[path], MESH)


def test_abstract_states_and_batches_have_the_layout_of_real_ones():
    plan = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MESH)
    optimizer = optim.adamw(1e-3)
    with cost.fake_group(8):
        real, abstract = ft.init_state(plan, random.key(0), optimizer), ft.abstract_state(plan, optimizer)
        assert tree.structure(real) == tree.structure(abstract)
        for (path, a), b in zip(tree.leaves_with_path(real), tree.leaves(abstract)):
            assert (a.shape, a.dtype, a.placements) == (b.shape, b.dtype, b.placements), path
            assert a.to_local().shape == b.to_local().shape and b.to_local().is_meta, path
        tokens = ft.abstract_batch(plan, ["tokens"], 8, 16)["tokens"]
        assert tokens.shape == (8, 16) and tokens.to_local().shape == (2, 16)
        assert tokens.placements == placements(P(("dp", "fsdp"), None), MESH)
        with pytest.raises(ValueError, match="a batch of 6 does not divide over dp=2 x fsdp=2; legal: multiples of 4"):
            ft.abstract_batch(plan, ["tokens"], 6, 16)


def test_a_mesh_needs_its_ranks():
    plan = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MESH)
    with pytest.raises(RuntimeError, match="needs 8 ranks, and there is no process group: start .*torchrun"):
        ft.init_params(plan, random.key(0))
    with cost.fake_group(4), pytest.raises(RuntimeError, match="needs 8 ranks, and the process group has 4"):
        ft.init_params(plan, random.key(0))
    with pytest.raises(ValueError, match="is one device"):
        ft.device_mesh(MeshSpec())


def test_a_new_process_group_has_a_new_mesh():
    plan = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MESH)
    meshes = []
    for _ in range(2):
        with cost.fake_group(8):
            meshes.append(ft.device_mesh(plan.mesh))
            assert ft.device_mesh(plan.mesh) is meshes[-1]
    assert meshes[0] is not meshes[1]
