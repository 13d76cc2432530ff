"""What `explain` says is what runs: of the operator and of a layer, observed at the registry's records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gape
from gape.cache import layer as paged_layer
from gape.cache.kv import KVCache
from gape.models.skipping import skip
from gape.ops import Plan, implementations, limits, prologue
from gape.ops.implementations import IMPLEMENTATIONS, RULES
from gape.ops.prologue import Projected
from tests.ops.cases import Case, layouts, random_case

GPU = "NVIDIA H200"
#: One of each kind among which the chooser tells apart.
LAYOUTS = ("plain", "one query", "shuffled", "packed", "mask with empty rows", "not causal", "far from zero")


def watched(monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> list[tuple[str, str]]:
    """Notes of each implementation that runs, and whether after a fused prologue; without `runs` they give zeros."""
    log: list[tuple[str, str]] = []

    def noting(name: str, prologue: str, run: Any) -> Any:
        def noted(*given: Any, **options: Any) -> Tensor:
            log.append((name, prologue))
            if runs:
                return run(*given, **options)
            q, v = (given[0].q, given[0].v) if prologue == "steps" else (given[0], given[2])
            return torch.zeros(*q.shape[:3], v.size(-1), dtype=q.dtype)

        return noted

    for name, each in list(IMPLEMENTATIONS.items()):
        fused = None if each.fused is None else replace(each.fused, run=noting(name, "fused", each.fused.run))
        monkeypatch.setitem(IMPLEMENTATIONS, name, replace(each, run=noting(name, "steps", each.run), fused=fused))
    return log


def cast(case: Case, dtype: torch.dtype, gradient: bool) -> dict[str, Tensor]:
    tensors = {n: x.to(dtype if n in "qkv" else torch.float32) for n, x in case.tensors.items()}
    return {n: x.requires_grad_(gradient) for n, x in tensors.items()}


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for dtype in (torch.float32, torch.bfloat16) for layout in LAYOUTS]
    # Kernels run in the interpreter here, slowly.
    + [("plain", torch.float16), ("one query", torch.float16)],
)
def test_the_operator_runs_what_is_explained(
    layout: str, dtype: torch.dtype, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = layouts()[layout]
    log, tensors = watched(monkeypatch, runs=False), cast(case, dtype, gradient)
    impls = ["auto", "reference", "rank2", "split"]
    if dtype == torch.float16:
        impls += ["triton"] + ["decode"] * (layout == "one query" and not gradient)
    for impl in impls:
        for eps in (0.0, 1e-2)[: 2 if impl in ("auto", "triton") else 1]:
            plan = gape.explain(**tensors, **case.options, impl=impl, eps=eps)
            gape.gated_attention(**tensors, **case.options, impl=impl, eps=eps)
            assert log.pop() == (plan.impl, "steps")
            assert impl in ("auto", plan.impl)
    assert not log


ON_A_GPU = {
    "one query": ("decode", random_case(n_q=1)),
    "few queries of float32": ("rank2", random_case(n_q=8, n_k=8, dtype=torch.float32)),
    "many queries": ("split", random_case()),
    "explicit positions": ("triton", random_case(q_positions=torch.arange(63), k_positions=torch.arange(63))),
    "documents": ("split", random_case(q_documents=torch.ones(2, 63).long(), k_documents=torch.ones(2, 63).long())),
    "mask": ("split", random_case(attn_mask=torch.ones(63, 63, dtype=torch.bool))),
    "measured": ("triton", random_case(n_q=1024, n_k=1024, batch=1)),
    "wider than measured": ("split", random_case(n_q=1024, n_k=1024, batch=1, dim=272)),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say they are on a GPU for which rules were measured."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    monkeypatch.setattr(implementations, "device_of", lambda problem: GPU)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "case"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_a_gpu_runs_what_is_explained(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    log = watched(monkeypatch, runs=False)
    tensors = cast(case, torch.float32 if name == "rank2" else torch.bfloat16, gradient=False)
    plan = gape.explain(**tensors, **case.options)
    gape.gated_attention(**tensors, **case.options)
    assert (plan.impl, log) == (name, [(name, "steps")])
    assert (plan.reason in {rule.reason for rule in RULES}) == (case is ON_A_GPU["measured"][1])


def test_details_come_from_those_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^impl: .*'reference'"):
        gape.detailed_attention(**case.tensors, **case.options, impl="split")
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    assert gape.detailed_attention(**case.tensors, **case.options).visited == 1


N = 20

#: What a layer is called with, what its input is like, and what then runs on a GPU.
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "plain": ({}, {}, ("split", "fused")),
    "training": ({}, {"gradient": True}, ("split", "fused")),
    "float32": ({}, {"dtype": torch.float32}, ("rank2", "steps")),
    "positions": ({"positions": torch.arange(N) + 5}, {}, ("triton", "steps")),
    "documents": ({"documents": torch.zeros(1, N, dtype=torch.int64)}, {}, ("split", "steps")),
    "mask": ({"attn_mask": torch.ones(N, N, dtype=torch.bool)}, {}, ("split", "steps")),
    "rank2": ({}, {"impl": "rank2"}, ("rank2", "steps")),
    "split": ({}, {"impl": "split"}, ("split", "fused")),
    "triton": ({}, {"impl": "triton"}, ("triton", "fused")),
    "triton, training": ({}, {"impl": "triton", "gradient": True}, ("triton", "steps")),
    "reference": ({}, {"impl": "reference"}, ("reference", "steps")),
    "skipping": ({}, {"eps": 1e-2}, ("triton", "fused")),
    "skipping, documents": ({"documents": torch.ones(1, N).long()}, {"eps": 1e-2}, ("triton", "steps")),
    "grouped heads": ({}, {"kv_heads": 1}, ("split", "fused")),
    "no room for the bias": ({}, {"reserve": 0}, ("split", "steps")),
}


def layer_and_input(
    *, dtype: torch.dtype = torch.float16, gradient: bool = False, eps: float = 0.0, kv_heads: int = 2, **options: Any
) -> tuple[gape.GAPEAttention, Tensor]:
    torch.manual_seed(0)
    layer = gape.GAPEAttention(64, 2, kv_heads, context_length=64, **options).to(dtype).requires_grad_(gradient)
    skip(layer, eps)
    return layer, torch.randn(1, N, 64).to(dtype)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("given", "kind", "runs"), LAYERS.values(), ids=LAYERS)
def test_a_layer_on_a_gpu_runs_what_is_explained(
    given: dict[str, Any], kind: dict[str, Any], runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer, x), log = layer_and_input(**kind), watched(monkeypatch, runs=False)
    plan = layer.explain(x, **given)
    layer(x, **given)
    assert (plan.impl, plan.prologue) == runs
    assert log == [runs]


@pytest.mark.parametrize(("given", "kind", "runs"), LAYERS.values(), ids=LAYERS)
def test_a_layer_on_a_cpu_runs_what_is_explained(
    given: dict[str, Any], kind: dict[str, Any], runs: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer, x), log = layer_and_input(**kind), watched(monkeypatch)
    plan = layer.explain(x, **given)
    layer(x, **given)
    assert log == [(plan.impl, "steps")]
    assert plan.prologue == "steps"


def test_a_layer_without_gates_is_not_explained() -> None:
    with pytest.raises(ValueError, match=r"^position: .*rope"):
        gape.GAPEAttention(64, 2, context_length=64, position="rope").explain(torch.zeros(1, N, 64))


def paged_watched(monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> list[str]:
    """Notes of what a layer of a cache in pages runs; without `runs`, what is only there on a GPU gives zeros."""
    log: list[str] = []

    def noting(name: str, zeros: Any) -> None:
        run = getattr(paged_layer, name)

        def noted(q: Any, *given: Any, **options: Any) -> Any:
            log.append(name)
            return run(q, *given, **options) if runs else zeros(q, *given)

        monkeypatch.setattr(paged_layer, name, noted)

    def blank(q: Tensor, *heads: int) -> Tensor:
        return torch.zeros(*q.shape[:3], *heads)

    noting("gated_attention", lambda q, k, v, *_: blank(q, v.size(-1)).to(q))
    noting("causal_attention", lambda q, k, v, *_: (blank(q, v.size(-1)).to(q), blank(q)))
    noting("paged_attention", lambda q, rate, positions, pages, **_: (blank(q, 32).to(q), blank(q)))
    noting("decode_prologue", lambda q, *_: (q, blank(q)))
    noting("projected_attention", lambda q, k, v, *_: Projected(q, blank(q), q, k, blank(q), blank(k)))
    return log


#: Tokens of each call, pads before the first, dtype, and what the last call runs on a GPU: plan and functions.
CACHED: dict[str, tuple[list[int], int, torch.dtype, tuple[str, str, int], list[str]]] = {
    "prompt": ([20], 0, torch.float16, ("pages", "fused", 1), ["projected_attention"]),
    "next chunk": ([20, 7], 0, torch.float16, ("pages", "fused", 2), ["projected_attention", "paged_attention"]),
    "token": ([20, 1], 0, torch.float16, ("pages", "fused", 1), ["decode_prologue", "paged_attention"]),
    "first token": ([1], 0, torch.float16, ("pages", "fused", 1), ["decode_prologue", "paged_attention"]),
    "pads": ([20], 3, torch.float16, ("pages", "steps", 1), ["causal_attention"]),
    "float32": ([20], 0, torch.float32, ("pages", "steps", 1), ["causal_attention"]),
    "float32, next chunk": (
        [20, 7], 0, torch.float32, ("pages", "steps", 2), ["causal_attention", "paged_attention"],
    ),
    "float32, token": ([20, 1], 0, torch.float32, ("pages", "fused", 1), ["decode_prologue", "paged_attention"]),
}  # fmt: skip


each_cache = pytest.mark.parametrize(
    ("case", "evicts"),
    [
        *(pytest.param(case, True, id=f"{name}, forgetting") for name, case in CACHED.items()),
        *(pytest.param(CACHED[name], False, id=f"{name}, full") for name in ("prompt", "next chunk", "token")),
    ],
)


def last_call(cache: Any, sizes: list[int], pads: int, dtype: torch.dtype, log: list[Any]) -> tuple[Plan, list[Any]]:
    """What the last of some calls of a layer is said to run, and what it ran."""
    gpt, documents = cache._model(), {}
    layer, pages = next(gpt.blocks()).attention, cache.layers[0]
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)).to(dtype)
            if pads:
                positions = (torch.arange(n) - pads).clamp(min=0)[None]
                documents = {"documents": (torch.arange(n) >= pads).long()[None], "positions": positions}
            plan = layer.explain(x, cache=pages, **documents)
            log.clear()
            layer(x, cache=pages, **documents)
    return plan, list(log)


def paged_gpt(dtype: torch.dtype) -> gape.GPT:
    torch.manual_seed(0)
    config = gape.GPTConfig(
        vocab_size=8, n_layer=1, n_head=2, n_embd=64, context_length=64, reserve=0, options={"gate_floor": 2.0}
    )
    return gape.GPT(config).to(dtype).requires_grad_(False)


@each_cache
def test_a_cache_on_a_gpu_runs_what_is_explained(case: Any, evicts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, pads, dtype, stated, runs = case
    gpt = paged_gpt(dtype)
    cache = gape.models.ForgettingCache(gpt, eps=1e-2) if evicts else gape.models.FullCache(gpt)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(limits, "HAS_TRITON", True)
    monkeypatch.setattr(paged_layer, "runs_in_kernels", lambda layout, device: True)
    monkeypatch.setattr(prologue, "ready", lambda device, dtype: dtype == torch.float16)
    plan, ran = last_call(cache, sizes, pads, dtype, paged_watched(monkeypatch, runs=False))
    assert (plan.impl, plan.prologue, plan.chunks, plan.backends) == (*stated, ("triton",))
    assert ran == runs


@each_cache
def test_a_cache_on_a_cpu_runs_what_is_explained(case: Any, evicts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, pads, dtype, *_ = case
    gpt = paged_gpt(dtype)
    cache = gape.models.ForgettingCache(gpt, eps=1e-2) if evicts else gape.models.FullCache(gpt)
    operators = watched(monkeypatch)
    plan, ran = last_call(cache, sizes, pads, dtype, paged_watched(monkeypatch))
    assert plan.prologue == "steps"
    if plan.impl == "pages":
        assert ran == (["paged_attention"] if sizes[-1] == 1 else ["causal_attention", "paged_attention"])
        assert plan.backends == ("torch",)
    else:
        assert (ran, operators) == (["gated_attention"], [(plan.impl, "steps")])


@pytest.mark.parametrize("n", [1, 7])
def test_a_layer_with_a_dense_cache_runs_what_is_explained(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, x), log, cache = layer_and_input(dtype=torch.float32), watched(monkeypatch), KVCache()
    with torch.no_grad():
        layer(x, cache=cache)
        log.clear()
        plan = layer.explain(x[:, :n], cache=cache)
        assert cache.length == N
        layer(x[:, :n], cache=cache)
    assert log == [(plan.impl, "steps")]
    assert plan.prologue == "steps"
