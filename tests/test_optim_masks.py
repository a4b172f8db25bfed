"""Masks of optimizers: who decays, and what a masked leaf costs."""

import pytest
import torch

from functitan import optim, tree
from sharding_specs import Param


def test_norms_and_biases_do_not_decay_by_default():
    # Where layers are stacked, norms and biases have two dims as well.
    params = {"w": torch.ones(2, 2), "bias": torch.ones(2), "scale": torch.ones(()), "layers": {
        "attn_norm": torch.ones(3, 4), "b": {"bias": torch.ones(3, 4)}, "ln_1": {"weight": torch.ones(3, 4)},
    }}  # fmt: skip
    zeros = tree.map(torch.zeros_like, params)
    for optimizer in (optim.adamw(0.5, weight_decay=0.5), optim.lion(0.5, weight_decay=0.5)):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        assert torch.equal(updates["w"], torch.full((2, 2), -0.25))
        rest = {path: u for path, u in tree.leaves_with_path(updates) if path != "w"}
        assert len(rest) == 5 and not any(u.any() for u in rest.values()), rest


def test_decay_mask_knows_stacked_norms():
    init = lambda key, shape, dtype: torch.zeros(shape)  # noqa: E731
    specs = {
        "layers": {
            "norm": Param((3, 4), ("layers", "embed"), init),
            "w": Param((3, 4, 5), ("layers", "embed", "mlp"), init),
        },
        "embedding": Param((9, 4), ("vocab", "embed"), init, decay=False),
        "unused": None,
    }
    mask = optim.decay_mask(specs)
    assert mask == {"layers": {"norm": False, "w": True}, "embedding": False, "unused": None}
    params = tree.map(lambda s: torch.ones(s.shape), specs)
    assert optim.default_decay_mask(params) == {"layers": {"norm": False, "w": True}, "embedding": True, "unused": None}
    optimizer = optim.adamw(1.0, weight_decay=0.5, mask=mask)
    updates, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params)
    assert {path: u.any().item() for path, u in tree.leaves_with_path(updates)} == {
        "embedding": False, "layers/norm": False, "layers/w": True,
    }  # fmt: skip


def test_decay_mask_wants_params_not_tensors():
    with pytest.raises(TypeError, match="layers/w is Tensor, not a Param"):
        optim.decay_mask({"layers": {"w": torch.ones(2)}})


def test_masked_out_leaves_have_no_state():
    params = {"a": torch.ones(2), "b": {"c": torch.ones(3)}}
    state = optim.masked(optim.trace(0.9), {"a": True, "b": False}).init(params)
    assert state.inner_state.trace["b"] == optim.MaskedNode()
    assert [path for path, _ in tree.leaves_with_path(state)] == ["inner_state/trace/a"]


def test_bad_masks_and_labels_are_named():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(TypeError, match="the mask at a is int 1"):
        optim.masked(optim.identity(), {"a": 1, "b": True}).init(params)
    with pytest.raises(ValueError, match="neither of the structure of the parameters nor a prefix"):
        optim.masked(optim.identity(), {"a": True}).init(params)
    with pytest.raises(ValueError, match="label 'x' at b has no transformation; legal: 'y'"):
        optim.partition({"y": optim.identity()}, {"a": "y", "b": "x"}).init(params)
