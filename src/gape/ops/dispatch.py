"""Which implementation `impl="auto"` runs, and why: rules that were measured first, then what is right everywhere.

The measured rules are in `dispatch.toml` beside this file; `benchmarks/dispatch.py` writes it from measured rows.
A rule speaks for the device it was measured on, by name, and for lengths from the shortest measured on; where none
speaks, the portable choice runs. GAPE_DISPATCH names another table.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from gape.ops import columns
from gape.ops.columns import significand_bits
from gape.ops.inputs import Problem, learning
from gape.utils.validation import invalid_argument

#: The table that comes with the library.
TABLE = Path(__file__).with_name("dispatch.toml")

#: Queries up to which the decode kernel is meant.
DECODE_QUERIES = 16

#: Widest head that the Triton kernels' tiles were made for.
TRITON_WIDTH = 256

#: Programs that CUDA takes along the second axis of a launch: kernels have one for each head, or each key head, of each
#: sample there.
MOST_PROGRAMS = 65_535

HALVES = (torch.bfloat16, torch.float16)

#: Looked up once: a compiler cannot trace the search.
HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the table: for these calls this implementation was the fastest that is exact.

    Attributes:
        device: the GPU's name.
        dtype: of q, k and v.
        gradient: whether a gradient is asked for.
        eps: whether tiles may be skipped.
        dim_at_most: largest head dim; the first rule that fits counts, so smaller ones come first.
        length_at_least: fewest keys; for one dim the longer ones come first.
        queries_at_most: most queries, 0 for no limit.
        queries_at_least: fewest queries: those of the shortest sequence that was measured.
        impl: the implementation.
        reason: what was measured.
    """

    device: str
    dtype: str
    gradient: bool
    eps: bool
    dim_at_most: int
    length_at_least: int
    impl: str
    reason: str
    queries_at_most: int = 0
    queries_at_least: int = 0

    def fits(self, problem: Problem, eps: float, device: str) -> bool:
        """Whether the rule speaks for a call on `device`."""
        width = max(problem.q.size(-1), problem.v.size(-1))
        queries = problem.seen.n_q
        meant = queries >= self.queries_at_least and (not self.queries_at_most or queries <= self.queries_at_most)
        kind = (device, _name(problem.q.dtype), needs_gradient(problem), eps > 0)
        same = kind == (self.device, self.dtype, self.gradient, self.eps)
        return same and meant and width <= self.dim_at_most and problem.seen.n_k >= self.length_at_least


_EXAMPLE = Rule(
    device="", dtype="", gradient=False, eps=False, dim_at_most=0, length_at_least=0, impl="", reason=""
)  # fmt: skip


def load(path: Path) -> tuple[Rule, ...]:
    """The rules of a table.

    Raises:
        ValueError: no table, a key that a rule does not have, one that is missing or of another type, or an
            implementation that is not known.
    """
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8")).get("rule", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"GAPE_DISPATCH: cannot read {path}, expected a table of rules: {error}") from error
    types = {field.name: type(getattr(_EXAMPLE, field.name)) for field in fields(Rule)}
    needed = {field.name for field in fields(Rule) if field.default is MISSING}
    for entry in told:
        wrong = sorted((set(entry) - set(types)) | (needed - set(entry)))
        if wrong:
            raise ValueError(f"{wrong[0]}: unknown or missing in a rule of {path}, expected {sorted(types)}")
        for name, value in entry.items():
            if type(value) is not types[name]:
                raise invalid_argument(name, value, f"{types[name].__name__} in {path}")
        if entry["impl"] not in CANNOT:
            raise invalid_argument("impl", entry["impl"], f"one of {sorted(CANNOT)} in {path}")
    return tuple(Rule(**entry) for entry in told)


def choose(problem: Problem, eps: float = 0.0) -> tuple[str, str]:
    """The implementation for a call and why.

    Args:
        problem: the call.
        eps: weight that may be dropped; nothing has to be.
    """
    device = device_of(problem)
    if device is not None:
        for rule in RULES:
            if rule.fits(problem, eps, device) and cannot(rule.impl, problem) is None:
                return rule.impl, rule.reason
    return portable(problem)


def device_of(problem: Problem) -> str | None:
    """The name by which rules know the device; None where there are none, on a CPU."""
    return torch.cuda.get_device_properties(problem.q.device).name if problem.q.is_cuda else None


def portable(problem: Problem) -> tuple[str, str]:
    """What is right on every device: the choice where nothing was measured."""
    dtype = _name(problem.q.dtype)
    if decodes(problem.q, problem.k, problem.v, learns=needs_gradient(problem)):
        return "decode", f"reads keys as they lie, for up to {DECODE_QUERIES} queries at any length"
    if _anywhere_on_gpu(problem) and cannot("triton", problem) is None:
        return "triton", "takes distances pair by pair, however far apart explicit positions are"
    if problem.q.dtype in HALVES:
        if problem.gates_learn and problem.seen.n_q > columns.ANCHORED_ROWS:
            return "split", f"exact bias and gate gradients in {dtype}, in calls of {columns.ANCHORED_ROWS:,} queries"
        return "split", f"exact bias in {dtype}"
    if significand_bits(problem.q) <= 11:
        return "split", "TF32 products would ruin the two-coordinate form"
    return "rank2", f"two coordinates are enough in {dtype}"


def _anywhere_on_gpu(problem: Problem) -> bool:
    """Whether positions may be far apart and cannot be read: explicit ones on a GPU. TF32 keeps less than they cost."""
    exact = problem.q.dtype in HALVES or significand_bits(problem.q) > 11
    return problem.q.is_cuda and not problem.seen.index_order and exact


def decodes(q: Tensor, k: Tensor, v: Tensor, *, learns: bool) -> bool:
    """Whether a call runs in the decode kernel unasked: few queries on a GPU, in half precision, without a gradient.

    Such queries find more keys at every token. cuDNN, which torch picks for them, plans anew for each number of keys;
    the kernel is compiled once.

    Args:
        q, k, v: (B, Hq, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv).
        learns: whether a gradient will be asked for.
    """
    return q.is_cuda and q.dtype in HALVES and _few_cannot(q, k, v, learns=learns) is None


def why_not(problem: Problem, eps: float = 0.0) -> dict[str, str]:
    """For every implementation that is not chosen: why it cannot run, or why it is not the one."""
    chosen, reason = choose(problem, eps)
    measured = (chosen, reason) != portable(problem)
    return {name: cannot(name, problem) or _not_best(name, problem, measured) for name in CANNOT if name != chosen}


def cannot(impl: str, problem: Problem) -> str | None:
    """Why an implementation cannot run a call; None where it can."""
    return CANNOT[impl](problem)


def needs_gradient(problem: Problem) -> bool:
    """Whether a gradient will be asked of any argument."""
    return learning(problem.q, problem.k, problem.v) or problem.gates_learn


def _not_best(impl: str, problem: Problem, measured: bool) -> str:
    """What speaks against an implementation that could run; `measured` where another was chosen by measurement."""
    if impl in REMARKS and not (measured and impl == "split"):
        return REMARKS[impl](problem)
    # The table has winners only: who lost to them, and who never took part, the rows know.
    return f"not measured {'as better ' if measured else ''}for this call here (benchmarks/attention.py)"


def _anywhere(problem: Problem) -> str | None:
    return None


def _triton_cannot(problem: Problem) -> str | None:
    return _kernels_cannot(problem.q, problem.v)


def _kernels_cannot(q: Tensor, v: Tensor) -> str | None:
    if not HAS_TRITON:
        return "is not installed: pip install triton"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA device"
    if q.dtype == torch.float64:
        return "has no float64"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "has no bfloat16 in Triton's interpreter, whose products of it are wrong"
    return _too_large(q, v)


def _too_large(q: Tensor, v: Tensor) -> str | None:
    """Why no kernel can be launched for a call's sizes."""
    if q.size(1) > MOST_PROGRAMS:
        return f"takes up to {MOST_PROGRAMS:,} heads"
    if max(q.size(-1), v.size(-1)) > TRITON_WIDTH:
        return f"takes head dims of up to {TRITON_WIDTH}"
    return None


def _decode_cannot(problem: Problem) -> str | None:
    return _few_cannot(problem.q, problem.k, problem.v, learns=needs_gradient(problem))


def _few_cannot(q: Tensor, k: Tensor, v: Tensor, *, learns: bool) -> str | None:
    if learns:
        return "has no backward pass"
    if q.size(2) > DECODE_QUERIES:
        return f"is for up to {DECODE_QUERIES} queries"
    if q.size(0) * k.size(1) > MOST_PROGRAMS:
        return f"takes up to {MOST_PROGRAMS:,} key heads, those of all samples together"
    return _kernels_cannot(q, v)


#: Every implementation: why it cannot run a call, or None.
CANNOT: dict[str, Callable[[Problem], str | None]] = {
    "reference": _anywhere,
    "rank2": _anywhere,
    "split": _anywhere,
    "triton": _triton_cannot,
    "decode": _decode_cannot,
}


#: What speaks against coordinates where :func:`_anywhere_on_gpu` says yes.
_FAR = "loses the bias where explicit positions are far apart, which is not read on a GPU"


def _rank2_remark(problem: Problem) -> str:
    if problem.q.dtype in HALVES:
        return f"loses the bias to rounding in {_name(problem.q.dtype)}"
    return _FAR if _anywhere_on_gpu(problem) else "loses the bias where products are rounded to TF32"


def _split_remark(problem: Problem) -> str:
    if decodes(problem.q, problem.k, problem.v, learns=needs_gradient(problem)):
        return "copies all keys for a few queries"
    return _FAR if _anywhere_on_gpu(problem) else "takes more coordinates"


#: What speaks against an implementation, measured or not.
REMARKS: dict[str, Callable[[Problem], str]] = {
    "reference": lambda problem: "keeps an Nq × Nk matrix: the definition, for checks",
    "rank2": _rank2_remark,
    "split": _split_remark,
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: The rules in use.
RULES = load(Path(os.environ.get("GAPE_DISPATCH", TABLE)))
