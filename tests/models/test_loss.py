"""The sliced loss: the plain one and its gradients, in slices that divide nothing, without whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

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


def test_weights_multiply_each_term_and_their_sum_divides_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_ROWS", 7)
    x, weight, targets = drawn(20, 101)
    weights = torch.rand(20, dtype=torch.float64) * 4
    each = F.cross_entropy(F.linear(x, weight), targets, ignore_index=-100, reduction="none") * weights
    theirs = each.sum() / weights[targets != -100].sum()
    totals = (
        loss.sliced_cross_entropy(x, weight, targets, weights),
        loss.summed_cross_entropy(F.linear(x, weight), targets, weights),
    )
    for total in totals:
        ours = loss.mean_loss(total, targets, weights)
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
        for a, b in zip(*(torch.autograd.grad(y, (x, weight), retain_graph=True) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    with torch.no_grad():
        total = loss.sliced_cross_entropy(x, weight, targets, weights)
    torch.testing.assert_close(total, each.sum(), atol=1e-9, rtol=1e-9)


def test_nothing_costs_nothing() -> None:
    x, weight, targets = drawn(0, 10)
    total = loss.sliced_cross_entropy(x, weight, targets)
    total.backward()
    assert total == 0
    assert (weight.grad == 0).all()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(3).int(), torch.zeros(1).long(), torch.zeros(3, 1).long()]
)
def test_targets_are_as_many_as_rows(wrong: torch.Tensor) -> None:
    """A kernel would read on behind fewer."""
    x, weight, _ = drawn(3, 10)
    for function in (loss.sliced_cross_entropy, loss.token_cross_entropy):
        with pytest.raises(ValueError, match=r"^targets: .*\(3,\)"):
            function(x, weight, wrong)


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


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, score = [], loss._score

    def spy(logits, *others, **options):
        seen.append((logits.size(0), logits.data_ptr()))
        return score(logits, *others, **options)

    monkeypatch.setattr(loss, "_score", spy)
    monkeypatch.setattr(loss, "LOSS_ROWS", 8)
    loss.sliced_cross_entropy(*drawn(30, 100)).backward()
    assert [rows for rows, _ in seen] == [8, 8, 8, 6]
    assert len({place for _, place in seen}) == 1


def test_a_frozen_weight_leaves_the_gradient_of_x() -> None:
    x, weight, targets = drawn(5, 10)
    (want,) = torch.autograd.grad(plain(x, weight, targets), x)
    (got,) = torch.autograd.grad(loss.sliced_cross_entropy(x, weight.detach(), targets), x)
    torch.testing.assert_close(got, want)


def test_the_weight_may_also_be_what_x_comes_from() -> None:
    _, weight, targets = drawn(20, 10)
    ids = torch.randint(10, (20,))
    both = []
    for function in (loss.sliced_cross_entropy, plain):
        x = weight[ids].tanh()
        # Used twice, as two heads on one trunk would.
        total = function(x, weight, targets) + 2 * function(x, weight, targets.flip(0))
        both.append(torch.autograd.grad(total, weight)[0])
    torch.testing.assert_close(*both)


def test_many_slices_lose_nothing_of_the_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up in float32: in bfloat16, 256 slices would lose two digits."""
    x, weight, targets = drawn(256, 64, ignored=0)
    x, weight = (y.detach().bfloat16().double().requires_grad_() for y in (x, weight))
    (want,) = torch.autograd.grad(plain(x, weight, targets), weight)
    errors = []
    for rows in (256, 1):
        monkeypatch.setattr(loss, "LOSS_ROWS", rows)
        y, table = (z.detach().float().requires_grad_() for z in (x, weight))
        with torch.autocast("cpu", torch.bfloat16):
            total = loss.sliced_cross_entropy(y, table, targets)
        errors.append(float((torch.autograd.grad(total, table)[0] - want).norm() / want.norm()))
    assert errors[1] < 1.2 * errors[0] < 0.005


def test_a_second_derivative_is_refused() -> None:
    x, weight, targets = drawn(5, 10)
    (first,) = torch.autograd.grad(loss.sliced_cross_entropy(x, weight, targets).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_not_passed_over_in_silence(bad: float) -> None:
    x, weight, targets = drawn(5, 10, ignored=0)
    x.data[2, 3] = bad
    total = loss.sliced_cross_entropy(x, weight, targets)
    assert total.isnan()
    targets[2] = -100
    assert loss.sliced_cross_entropy(x, weight, targets).isfinite()


def test_it_compiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "LOSS_ROWS", 16)
    torch._dynamo.reset()
    x, weight, targets = drawn(40, 90, dtype=torch.float32)
    compiled = torch.compile(loss.sliced_cross_entropy, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(x, weight, targets), (x, weight)) for f in (compiled, plain)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight, targets), plain(x, weight, targets))


def test_a_target_outside_the_vocabulary_is_named() -> None:
    x, weight, _ = drawn(3, 10)
    with pytest.raises(ValueError, match=r"^targets: "):
        loss.sliced_cross_entropy(x, weight, torch.tensor([1, 10, -100]))
