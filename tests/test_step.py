"""The training step as a plain function on plain tensors, then captured: the numbers of the hand-written step."""

import attrs
import pytest
import torch
import torch.nn.functional as F

import functitan as ft
from functitan import nn, optim, random, tree
from models import llama
from sharding_specs import MeshSpec, Param, Rules
from train.step import make_eval_step, make_train_step

CFG = llama.LlamaConfig(vocab_size=32, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, dropout=0.1)
RATE = 1e-2


def model(params, batch, key=None):
    return llama.apply(params, batch, CFG, key=key)


def no_dropout(params, batch, key=None):
    return llama.apply(params, batch, CFG)


def make_optimizer():
    mask = optim.decay_mask(llama.declare(CFG))
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(RATE, mask=mask))


def initial_state():
    return ft.init_state(ft.compile_specs(llama.declare(CFG)), random.key(0), make_optimizer())


def batch_of(seed=0, batch=4, seq=16):
    text = random.randint(random.key(seed), (batch, seq + 1), 0, CFG.vocab_size).to(torch.int64)
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def make_step(apply=model, accumulation=1):
    return make_train_step(apply, make_optimizer(), optim.constant_schedule(RATE), accumulation)


def assert_close(a, b, rtol=1e-6, atol=1e-7):
    assert tree.structure(a) == tree.structure(b)
    for (path, x), y in zip(tree.leaves_with_path(a), tree.leaves(b)):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, path=path: f"{path}: {m}")


def test_the_designs_example_runs_as_written():
    """DESIGN's "The user's code": a model in a few lines, its step tested as a plain function, then jitted."""

    def declare(dim, hidden):
        return {
            "up": Param((dim, hidden), ("embed", "mlp"), ft.init.normal(dim**-0.5)),
            "down": Param((hidden, dim), ("mlp", "embed"), ft.init.normal(hidden**-0.5)),
        }

    def apply(params, x):
        h = ft.nn.silu(x @ params["up"])
        h = ft.constrain(h, ("batch", "seq", "mlp"))
        return h @ params["down"]

    optimizer = optim.adamw(1e-2)

    def train_step(state, batch):
        loss, grads = ft.value_and_grad(lambda p: ((apply(p, batch["x"]) - batch["y"]) ** 2).mean())(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return attrs.evolve(state, params=params, opt_state=opt_state, step=state.step + 1), {"loss": loss}

    rules = Rules(batch=("dp", "fsdp"), seq="cp", embed="fsdp", mlp="tp")
    plan = ft.compile_specs(declare(8, 16), rules, MeshSpec(fsdp=1, tp=1))
    assert "up" in str(plan)
    batch = {"x": random.normal(random.key(1), (4, 6, 8)), "y": random.normal(random.key(2), (4, 6, 8))}
    plain = captured = ft.init_state(plan, key=random.key(0), optimizer=optimizer)
    step = ft.jit(train_step, plan, donate=("state",))
    captured = tree.map(torch.clone, captured)
    losses = []
    for _ in range(20):
        plain, metrics = train_step(plain, batch)
        captured, jitted = step(captured, batch)
        assert torch.equal(metrics["loss"], jitted["loss"])
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert_close(captured.params, plain.params, 0, 0)
    with pytest.raises(RuntimeError, match="needs 8 ranks, and there is no process group"):
        ft.jit(train_step, ft.compile_specs(declare(8, 16), rules, MeshSpec(fsdp=4, tp=2)))(plain, batch)


def test_step_equals_torch_by_hand():
    """Three steps against autograd, clip_grad_norm_ and torch.optim.AdamW."""
    state, step = initial_state(), make_step(no_dropout)
    params = tree.map(lambda p: p.clone().requires_grad_(), state.params)
    decays = tree.leaves(optim.decay_mask(llama.declare(CFG)))
    leaves = tree.leaves(params)
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 1e-4 if decay else 0.0} for p, decay in zip(leaves, decays)], lr=RATE
    )
    for i in range(3):
        batch = batch_of(i)
        state, metrics = step(state, batch)
        loss = F.cross_entropy(no_dropout(params, batch).flatten(0, 1), batch["labels"].flatten())
        reference.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        reference.step()
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-5, atol=1e-6)
    assert_close(state.params, tree.map(torch.Tensor.detach, params), rtol=1e-4, atol=2e-6)
    assert int(state.step) == 3 and int(state.data["position"]) == 12 and int(state.skipped) == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_captured_equals_plain_with_dropout(accumulation):
    plain = captured = initial_state()
    captured = tree.map(torch.clone, captured)
    step = make_step(accumulation=accumulation)
    jitted = ft.jit(step, donate=("state",))
    for i in range(3):
        plain, a = step(plain, batch_of(i))
        captured, b = jitted(captured, batch_of(i))
        assert_close(a, b, 1e-6, 0)
    assert_close(captured, plain, 1e-5, 1e-7)
    assert len(jitted.captures) == 1


def test_purity():
    """L7: the same (state, batch) twice is the same result, and the input is unchanged."""
    state, batch = initial_state(), batch_of()
    copy = tree.map(torch.clone, state)
    for step in (make_step(), ft.jit(make_step())):
        first, second = step(state, batch), step(state, batch)
        assert_close(first, second, 0, 0)
        assert_close(state, copy, 0, 0)


def test_dropout_differs_from_step_to_step_and_seed_fixes_it():
    state, batch = initial_state(), batch_of()
    step = make_step()
    after, first = step(state, batch)
    _, again = step(state, batch)
    _, other = step(attrs.evolve(state, step=state.step + 1), batch)
    assert torch.equal(first["loss"], again["loss"]) and not torch.equal(first["loss"], other["loss"])


def test_ignored_labels_over_accumulation():
    """L3: 1 valid label with loss 2 and 9 with loss 10 make 9.2, not the 6.0 of a mean of means."""
    losses = torch.tensor([2.0] + [10.0] * 9)
    labels = torch.full((2, 10), -100)
    labels[0, 0], labels[1, :9] = 0, 0

    def fixed(params, batch, key=None):
        # Logits whose cross-entropy at label 0 is the wanted loss: log(1 + exp(z)) = loss for logits (0, z).
        z = torch.log(torch.expm1(batch["want"])) + 0 * params["w"]
        return torch.stack([torch.zeros_like(z), z], dim=-1)

    want = torch.ones(2, 10)
    want[0, 0], want[1, :9] = losses[0], losses[1:]
    batch = {"tokens": labels.clamp(min=0), "labels": labels, "want": want}
    plan = ft.compile_specs({"w": Param((), (), ft.init.zeros())})
    for accumulation in (1, 2):
        optimizer = optim.sgd(0.1)
        step = make_train_step(fixed, optimizer, optim.constant_schedule(0.1), accumulation)
        _, metrics = step(ft.init_state(plan, random.key(0), optimizer), batch)
        assert float(metrics["loss"]) == pytest.approx(9.2, rel=1e-6)
        assert int(metrics["tokens"]) == 10


def test_accumulation_changes_no_number():
    batch = batch_of(batch=8)
    batch["labels"] = torch.where(random.uniform(random.key(9), (8, 16)) < 0.3, -100, batch["labels"])
    whole, a = make_step(no_dropout)(initial_state(), batch)
    parts, b = make_step(no_dropout, accumulation=4)(initial_state(), batch)
    assert_close(a, b, 1e-5, 1e-6)
    assert_close(whole.params, parts.params, 1e-4, 1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_without_finite_gradients_changes_nothing_and_is_counted(bad):
    """N1, for the plain and the captured step."""

    def poisoned(params, batch, key=None):
        return no_dropout(params, batch) * batch["scale"][:, :, None]

    batch = batch_of() | {"scale": torch.ones(4, 16)}
    worse = batch | {"scale": torch.full((4, 16), bad)}
    for step in (make_step(poisoned), ft.jit(make_step(poisoned))):
        before, _ = step(initial_state(), batch)
        after, metrics = step(before, worse)
        assert int(metrics["skipped"]) == 1 and not torch.isfinite(metrics["grad_norm"])
        assert_close(after.params, before.params, 0, 0)
        assert_close(after.opt_state, before.opt_state, 0, 0)
        assert int(after.step) == 2 and int(after.skipped) == 1
        then, metrics = step(after, batch)
        assert int(metrics["skipped"]) == 0 and all(torch.isfinite(p).all() for p in tree.leaves(then.params))


def test_a_batch_without_valid_labels_changes_nothing():
    batch = batch_of()
    state = initial_state()
    after, metrics = make_step()(state, batch | {"labels": torch.full_like(batch["labels"], -100)})
    assert int(metrics["skipped"]) == 1
    assert_close(after.params, state.params, 0, 0)


def test_eval_step_sums():
    state, batch = initial_state(), batch_of()
    sums = make_eval_step(model)(state.params, batch)
    mean = F.cross_entropy(no_dropout(state.params, batch).flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(sums["loss_sum"] / sums["tokens"], mean)


def test_remat_keeps_the_numbers_and_shows_in_the_graph():
    """Also captured: no pass may merge what remat computes again with the first run."""

    def remat(params, batch, key=None):
        return llama.apply(params, batch, CFG, key=key, remat="full")

    graphs = {}
    results = []
    for name, apply in {"none": model, "full": remat}.items():
        step = ft.jit(make_step(apply))
        state = initial_state()
        for i in range(2):
            state, metrics = step(state, batch_of(i))
        results.append((state.params, metrics))
        targets = [str(node.target) for node in step.captures[0].graph.graph.nodes]
        graphs[name] = sum("flash_attention_for_cpu.default" in t for t in targets)
    assert_close(*results, 1e-5, 1e-7)
    assert graphs == {"none": CFG.n_layers, "full": 2 * CFG.n_layers}


def test_bfloat16_compute_keeps_float32_state():
    from train.build import build_model
    from train.recipes import recipe

    config = recipe("debug")
    config = attrs.evolve(config, model=CFG, train=attrs.evolve(config.train, precision="bfloat16"))
    state, metrics = make_step(build_model(config))(initial_state(), batch_of())
    exact, reference = make_step(no_dropout)(initial_state(), batch_of())
    assert all(p.dtype == torch.float32 for p in tree.leaves(state.params))
    assert metrics["loss"].dtype == torch.float32
    torch.testing.assert_close(metrics["loss"], reference["loss"], rtol=2e-2, atol=0)


def test_cross_entropy_of_a_model_that_knows_nothing():
    loss_sum, count = nn.cross_entropy(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64))
    assert float(loss_sum / count) == pytest.approx(5.545, abs=1e-3)
