"""Training: the quick forward is the library's function, and a few steps learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trace_client.demo import pretrain as module
from trace_client.demo.muon import orthogonalised
from trace_client.demo.pretrain import Schedule, pretrain, training_forward

TEXT = torch.tensor(list(b"def f(x):\n    return x + 1\n\n" * 200))


def test_forward_and_gradients_are_the_librarys(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAPACITY", 4.0)  # no token is dropped
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    quick, _ = training_forward(model, tokens)
    quick.square().mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    plain = model(input_ids=tokens).logits
    plain.square().mean().backward()
    torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_an_expert_takes_no_more_than_its_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_MULTIPLE", 1)
    expert = torch.tensor([0] * 10 + [1] * 2)
    slot_of_pair, pair_of_slot = module._slots(expert, torch.bincount(expert, minlength=2))
    capacity = len(pair_of_slot) // 2
    assert capacity == 9
    assert (slot_of_pair == 2 * capacity).sum() == 1
    kept = slot_of_pair < 2 * capacity
    assert torch.equal(pair_of_slot[slot_of_pair[kept]], torch.arange(12)[kept])
    assert torch.equal(slot_of_pair[kept] // capacity, expert[kept])


def test_loss_falls_and_the_model_ends_in_bf16(model: Any) -> None:
    heard: list[int] = []
    schedule = Schedule(steps=12, batch=8, length=32, warmup=2)
    losses = pretrain(model, TEXT, schedule, torch.Generator().manual_seed(0), lambda step, loss: heard.append(step))
    assert heard == list(range(1, 13))
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 1
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_time_ends_training_too(model: Any) -> None:
    seconds = iter(range(0, 1000, 10))
    schedule = Schedule(steps=100, seconds_max=45, batch=2, length=16)
    losses = pretrain(
        model, TEXT, schedule, torch.Generator().manual_seed(0), lambda step, loss: None, lambda: float(next(seconds))
    )
    assert len(losses) == 4


def test_rates_warm_up_then_end_at_zero() -> None:
    schedule = Schedule(steps=100, seconds_max=1000, warmup=10)
    assert [schedule.factor(step, 0) for step in (0, 9, 50)] == [0.1, 1.0, 1.0]
    assert schedule.factor(75, 0) == pytest.approx(0.5)
    assert schedule.factor(100, 0) == 0
    assert schedule.factor(0, 1000) == 0


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (2, 16, 16)])
def test_orthogonalised_keeps_the_singular_vectors(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalised(given).float()
    values = torch.linalg.svdvals(result)
    spread_before = torch.linalg.svdvals(given).amax(dim=1) / torch.linalg.svdvals(given).amin(dim=1)
    assert result.shape == given.shape
    assert (values.amax(dim=1) < 1.6).all()
    assert ((values.amax(dim=1) / values.amin(dim=1)) < spread_before).all()
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    aligned = torch.einsum("nij,nik,nkj->nj", left, result, right.mT)
    assert (aligned > 0).all()
