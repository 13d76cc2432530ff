"""The sliced loss: the plain one and its gradients, in slices that divide nothing, without whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from gape.models import loss


def drawn(rows: int, vocabulary: int, ignored: float = 0.3, dtype: torch.dtype = torch.float64):
    torch.manual_seed(rows)
    x = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    targets[torch.rand(rows) < ignored] = -100
    return x, weight, targets


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(("rows", "vocabulary", "ignored"), [(20, 101, 0.3), (21, 64, 0.0), (3, 65, 0.5), (9, 7, 1.0)])
def test_it_is_the_plain_loss(rows: int, vocabulary: int, ignored: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_ROWS", 7)
    x, weight, targets = drawn(rows, vocabulary, ignored)
    ours, theirs = loss.sliced_cross_entropy(x, weight, targets), plain(x, weight, targets)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    # A factor behind the loss, as accumulation has one.
    for a, b in zip(*(torch.autograd.grad(0.3 * y, (x, weight)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(loss.sliced_cross_entropy(x, weight, targets), theirs, atol=1e-9, rtol=1e-9)
    each = loss.token_cross_entropy(x, weight, targets)
    assert each.shape == targets.shape
    assert (each[targets == -100] == 0).all()
    torch.testing.assert_close(each.sum(), theirs, atol=1e-9, rtol=1e-9)


def test_nothing_costs_nothing() -> None:
    x, weight, targets = drawn(0, 10)
    total = loss.sliced_cross_entropy(x, weight, targets)
    total.backward()
    assert total == 0
    assert (weight.grad == 0).all()


def test_logits_far_below_zero_are_no_trouble() -> None:
    """Padding columns have the logit 0, far above every real one."""
    x, weight, targets = torch.ones(4, 1), torch.full((10, 1), -300.0), torch.arange(4)
    x.requires_grad_()
    total = loss.sliced_cross_entropy(x, weight, targets)
    total.backward()
    torch.testing.assert_close(total, 4 * torch.tensor(10.0).log())
    assert x.grad.isfinite().all()


def test_autocast_shortens_the_products_alone() -> None:
    x, weight, targets = drawn(40, 90, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total = loss.sliced_cross_entropy(x, weight, targets)
    theirs = plain(x, weight, targets)
    assert total.dtype == torch.float32
    assert 0 < abs(float((total - theirs).detach())) < 0.01 * float(theirs.detach())
    for a, b in zip(*(torch.autograd.grad(y, (x, weight)) for y in (total, theirs)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.02


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_ROWS", 8)
    x, weight, targets = drawn(200, 512)
    with Largest() as seen:
        loss.sliced_cross_entropy(x, weight, targets).backward()
    assert seen.numbers == 512 * 16


def test_it_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_ROWS", 16)
    torch._dynamo.reset()
    x, weight, targets = drawn(40, 90, dtype=torch.float32)
    compiled = torch.compile(loss.sliced_cross_entropy, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(x, weight, targets), (x, weight)) for f in (compiled, plain)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_target_outside_the_vocabulary_is_named() -> None:
    x, weight, _ = drawn(3, 10)
    with pytest.raises(ValueError, match=r"^targets: "):
        loss.sliced_cross_entropy(x, weight, torch.tensor([1, 10, -100]))
