"""The kernel that turns logits into losses and gradients, against float64 and against the steps it replaces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gape.models import loss

pytest.importorskip("triton")
from gape.ops.triton import cross_entropy as kernel

# The interpreter computes with numpy, which warns of what is asked for here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Triton's interpreter cuts bfloat16 off instead of rounding it.
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPES = [torch.float32, *HALVES]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp, so that short rows have whole tiles of 512 and lines of 256."""
    monkeypatch.setattr(kernel, "WARPS", 1)


def drawn(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits with padding that must not be read, and targets of which one is ignored."""
    torch.manual_seed(vocabulary)
    logits = torch.full((rows, -(-vocabulary // 64) * 64), float("nan"))
    logits[:, :vocabulary] = 5 * torch.randn(rows, vocabulary)
    targets = torch.randint(vocabulary, (rows,))
    targets[0], targets[1] = vocabulary - 1, -100
    return logits.to(DEVICE, dtype), targets.to(DEVICE)


def exact(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    wide = logits[:, :vocabulary].double().requires_grad_()
    losses = F.cross_entropy(wide, targets, ignore_index=-100, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    return losses.detach(), F.pad(gradient, (0, logits.size(1) - vocabulary))


@pytest.mark.parametrize("score", [kernel.score_rows, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 1024, 1300])
def test_losses_and_gradients_are_those_of_float64(vocabulary: int, dtype: torch.dtype, score) -> None:
    logits, targets = drawn(5, vocabulary, dtype)
    want = exact(logits, targets, vocabulary)
    before = logits.clone()
    arguments = (vocabulary, -100) if score else (vocabulary,)
    score = score or loss._score_stepwise
    alone = score(logits, targets, *arguments, False)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    losses = score(logits, targets, *arguments, True)
    assert torch.equal(losses, alone)
    torch.testing.assert_close(losses.double(), want[0], atol=1e-5, rtol=1e-5)
    # Half a unit in the last place of the dtype, and float32's own error.
    rounding = torch.finfo(dtype).eps / 2 + 1e-5
    torch.testing.assert_close(logits.double(), want[1], atol=1e-7, rtol=rounding)
    assert (logits[:, vocabulary:] == 0).all()
    assert (logits[1] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [3, 700, 1299])
def test_what_is_not_finite_shows_in_the_loss(bad: float, column: int) -> None:
    logits, targets = drawn(3, 1300, torch.float16)
    logits[:, column] = bad
    losses = kernel.score_rows(logits, targets, 1300, -100, True)
    assert losses.isnan().tolist() == [True, False, True]
    assert logits[0].isnan().any()
    assert (logits[1] == 0).all()


def test_logits_of_minus_infinity_have_no_share() -> None:
    logits, targets = drawn(3, 1300, torch.float16)
    logits[2] = float("-inf")
    logits[0, :1200] = float("-inf")
    want = exact(logits[:1], targets[:1], 1300)
    losses = kernel.score_rows(logits, targets, 1300, -100, True)
    torch.testing.assert_close(losses[0].double(), want[0][0], atol=1e-5, rtol=1e-5)
    assert losses[2].isnan()
    assert (logits[0, :1200] == 0).all()


@pytest.mark.parametrize("target", [1300, 1343, -1, 10**9])
def test_a_target_that_does_not_exist_shows_in_the_loss(target: int) -> None:
    logits, targets = drawn(3, 1300, torch.float16)
    targets[2] = target
    losses = kernel.score_rows(logits, targets, 1300, -100, True)
    assert losses.isnan().tolist() == [False, False, True]


def compared(dtype: torch.dtype, function) -> list[float]:
    """Relative errors of loss, dx and dweight against float64 on operands of `dtype`."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 32, device=DEVICE).to(dtype) for n in (10, 600))
    targets = torch.randint(600, (10,), device=DEVICE)
    targets[::7] = -100
    results = []
    for wide, f in ((torch.float64, loss.sliced_cross_entropy), (torch.float32, function)):
        y, table = (z.to(wide).requires_grad_() for z in (x, weight))
        with torch.autocast(DEVICE, dtype, enabled=wide == torch.float32):
            total = f(y, table, targets)
        results.append([total.detach().double(), *(g.double() for g in torch.autograd.grad(0.3 * total, (y, table)))])
    return [float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True)]


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_whole_is_as_near_as_plain_attempts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(logits, targets, vocabulary, *, gradient):
        return kernel.score_rows(logits, targets, vocabulary, -100, gradient)

    monkeypatch.setattr(loss, "_score", scored)
    monkeypatch.setattr(loss, "LOSS_ROWS", 8)
    for ours, theirs in zip(compared(dtype, loss.sliced_cross_entropy), compared(dtype, plain), strict=True):
        assert ours < 2 * theirs + 1e-6


@pytest.mark.gpu
def test_compiled_on_a_gpu_it_is_the_same() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss.sliced_cross_entropy, fullgraph=True)
    for ours, theirs in zip(compared(torch.bfloat16, compiled), compared(torch.bfloat16, plain), strict=True):
        assert ours < 2 * theirs + 1e-6


@pytest.mark.gpu
def test_real_sizes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dtype in DTYPES:
        assert kernel.WARPS > 1
        logits, targets = drawn(300, 50257, dtype)
        want = exact(logits, targets, 50257)
        losses = kernel.score_rows(logits, targets, 50257, -100, True)
        torch.testing.assert_close(losses.double(), want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits.double(), want[1], atol=1e-7, rtol=torch.finfo(dtype).eps / 2 + 2e-5)
