"""The account behind the promise, by its own formulas, and queries that are measured one by one or together."""

from __future__ import annotations

import pytest
import torch
from gape.cache.forgetting_ledger import Ledger, Verdict
from gape.cache.forgetting_limits import Limits
from gape.cache.forgetting_seen import Seen
from gape.cache.forgetting_shelf import STRIDE

from tests.models.tiny import model

EPS, AT = 1e-2, 200


def judged() -> tuple[Ledger, Verdict, int]:
    """A ledger of two samples, two key heads and four query heads, after it has booked what could be spared."""
    random = torch.Generator().manual_seed(0)

    def drawn(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(2, 2, 50, generator=random, dtype=torch.float64)

    rate = torch.tensor([0.2, 0.22, 0.25, 0.3], dtype=torch.float64)
    known = Limits(rate=rate, reach=torch.full_like(rate, 0.5), own=torch.full_like(rate, 0.1), jitter=rate)
    ledger = Ledger(EPS, (2, 2, 2), torch.device("cpu"))
    ledger.bring(known, torch.tensor([AT, AT]))
    positions = torch.arange(100, 150).expand(2, 2, -1)
    verdict = ledger.judge(torch.arange(2), drawn(0, 3), drawn(0.3, 1), positions)
    count = int(verdict.spared.amin())
    ledger.charge(verdict, count)
    return ledger, verdict, count


def test_a_query_is_counted_by_the_formula_of_the_page() -> None:
    ledger, verdict, count = judged()
    assert 5 < count < 50
    gone, cost = verdict.order[..., :count], verdict.cost[..., :count]
    speed = 2.0 ** -(1 + (-torch.log2(verdict.exposure.gather(-1, gone))).floor())
    longest = verdict.norm.gather(-1, gone).amax(-1)
    random = torch.Generator().manual_seed(1)
    reach, own = (torch.randn(2, 2, 2, 40, generator=random, dtype=torch.float64) for _ in range(2))
    reach, positions = 0.5 + reach, torch.arange(AT, AT + 40).expand(2, -1)
    rate = torch.tensor([[0.2, 0.22], [0.25, 0.3]], dtype=torch.float64)
    faded = torch.exp(-rate[..., None, None] * speed[:, :, None, None] * (positions - AT)[:, None, None, :, None])
    mass = (cost[:, :, :, None] * faded).sum(-1)
    missed = mass * torch.exp((reach - 0.5).clamp(min=0) * longest[..., None, None] - own - 0.1)
    expected = int((missed > EPS).sum())
    assert 10 < expected < 150
    assert int(ledger.uncertain(reach.flatten(1, 2), own.flatten(1, 2), positions)) == expected


def test_heads_are_judged_together_as_they_are_alone() -> None:
    _, together, count = judged()
    ledger, _, _ = judged()
    before = ledger._mass.clone()
    ledger.charge(together.of(torch.tensor([1])), count)
    booked = ledger._mass - before
    assert booked[:, 0].abs().max() == 0
    torch.testing.assert_close(booked[:, 1], before[:, 1])


def test_queries_measured_one_by_one_are_measured_as_together() -> None:
    attention = next(model(n_kv_head=2, options={"gate_floor": 4.0}).blocks()).attention
    ledger, _, _ = judged()
    random = torch.Generator().manual_seed(2)
    q, k = (3 * torch.randn(2, heads, 70, 6, generator=random, dtype=torch.float64) for heads in (4, 2))
    gate = torch.rand(2, 4, 70, generator=random, dtype=torch.float64)
    floors, where = torch.ones(4, dtype=torch.float64), torch.arange(AT, AT + 70).expand(2, -1)
    singly, explicit, replayed, at_once = (Seen(attention, floors) for _ in range(4))
    for step in range(70):
        asked = [x[:, :, step : step + 1] for x in (q, k, gate)]
        noted = [*asked, AT + step]
        if step < 3 or 15 < step < 35:
            # Launched before and in between.
            replayed.note(*noted, ledger)
        else:
            replayed.room(k).write(*asked[:2], torch.tensor([(AT + step) % STRIDE]))
            replayed.replayed(AT + step, ledger)
        singly.note(*noted, ledger)
        explicit.note(*noted[:3], where[:, step : step + 1], ledger)
    at_once.note(q, k, gate, AT, ledger)
    counts = [seen.beyond(ledger) for seen in (singly, explicit, replayed, at_once)]
    assert len(set(counts)) == 1
    assert 0 < counts[0] < 2 * 4 * 70
    for seen in (singly, replayed):
        for one, other in zip(vars(seen.limits()).values(), vars(at_once.limits()).values(), strict=True):
            torch.testing.assert_close(one, other)
    later = Seen(attention, floors)
    later.note(q, k, gate, AT + 50, ledger)
    assert later.beyond(ledger) < counts[0]


def test_a_measurement_that_breaks_off_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = next(model(n_kv_head=2, options={"gate_floor": 4.0}).blocks()).attention
    ledger, _, _ = judged()
    random = torch.Generator().manual_seed(2)
    q, k = (3 * torch.randn(2, heads, STRIDE, 6, generator=random, dtype=torch.float64) for heads in (4, 2))
    plain, seen = (Seen(attention, torch.ones(4, dtype=torch.float64)) for _ in range(2))
    plain.note(q, k, q[..., 0], 192, ledger)
    for kept, asked in zip(seen.room(k), (q, k), strict=True):
        kept.copy_(asked)
    for position in range(192, 191 + STRIDE):
        seen.replayed(position, ledger)
    last = 191 + STRIDE
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "uncertain", lambda *told: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            seen.replayed(last, ledger)
    seen.replayed(last, ledger)
    assert seen.beyond(ledger) == plain.beyond(ledger) > 0
