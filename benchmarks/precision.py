"""What each implementation of the operator loses to its dtype: errors against float64 on the same inputs.

Outputs: 64 last queries of a sequence. Gradients: every query, a random cotangent. T = 1,024 and head dim 64
throughout; q, k, v are normal, gates uniform within half of their mean Γg, landmarks uniform over [0, 1].
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import common
from common import DATA, Row
from gape.cli.options import Device
from gape.experiments.experiment import pick_device
from gape.experiments.operator_calls import attended
from gape.experiments.operator_calls import relative as error
from gape.ops import attention
from gape.utils import run_info
from gape.utils.progress import Progress

#: The stored rows, in a clone.
ROWS = DATA / "precision.csv"

HEAD_DIM, QUERIES = 64, 64
#: Pairs of a query and a key whose float64 logits are held at once: a gigabyte for each tensor of that shape.
PAIRS = 2**27
STRENGTHS = (1, 10, 100)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GRADIENTS = {"dgate": "gate", "dlandmark": "landmark", "damplitude": "amplitude", "dq": "q", "dk": "k", "dv": "v"}
#: Those that attention without a bias does not have.
GATES = ("dgate", "dlandmark", "damplitude")
#: Columns of figures: attention without any bias, and implementations of the operator. Stored rows have `anchored`,
#: which is what `split` is today: it had another name while `split` took any number of queries in one call.
COLUMNS = ("plain", "rank2", "split", "anchored", "triton")
FIELDS = ("device", "torch", "commit", "quantity", "dtype", "keys", "strength", *COLUMNS)


def inputs(keys: int, queries: int, heads: int, dtype: torch.dtype, strength: float, device: str) -> dict[str, Tensor]:
    """Random arguments of the operator; q, k, v in `dtype`, gates in float32."""
    g = torch.Generator().manual_seed(keys)

    def normal(n: int) -> Tensor:
        return torch.randn(1, heads, n, HEAD_DIM, generator=g).to(device=device, dtype=dtype)

    gate = strength * (0.5 + torch.rand(1, heads, queries, generator=g))
    landmark = torch.rand(1, heads, keys, generator=g)
    tensors = {"q": normal(queries), "k": normal(keys), "v": normal(keys)}
    gates = {"gate": gate, "landmark": landmark, "amplitude": torch.ones(heads)}
    return tensors | {name: x.to(device) for name, x in gates.items()}


def implementations(device: str) -> Sequence[str]:
    """What is measured; `triton` wants a GPU."""
    return ("rank2", "split", "triton") if device == "cuda" else ("rank2", "split")


def exactly(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in float64."""
    return {name: x.double() for name, x in tensors.items()}


@cache
def exact_plain(keys: int, dtype: torch.dtype, device: str) -> Tensor:
    """Attention without a bias, which no strength of the gates changes."""
    x = inputs(keys, QUERIES, 4, dtype, 1, device)
    return attention(x["q"].double(), x["k"].double(), x["v"].double())


def output_errors(keys: int, dtype: torch.dtype, strength: float, device: str) -> dict[str, float]:
    """Errors of the output by implementation, and of attention without any bias."""
    x = inputs(keys, QUERIES, 4, dtype, strength, device)
    q, k, v = x["q"], x["k"], x["v"]
    exact = attended(exactly(x), impl="reference")
    errors = {"plain": error(attention(q, k, v), exact_plain(keys, dtype, device))}
    for impl in implementations(device):
        errors[impl] = error(attended(x, impl=impl), exact)
    return errors


def gradients(tensors: dict[str, Tensor], impl: str | None, cotangent: Tensor) -> dict[str, Tensor]:
    """Gradients of <output, cotangent> by argument; impl None is attention without a bias."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = attention(leaves["q"], leaves["k"], leaves["v"]) if impl is None else attended(leaves, impl=impl)
    inputs = {name: x for name, x in leaves.items() if impl is not None or name in "qkv"}
    grads = torch.autograd.grad(out, list(inputs.values()), cotangent.to(out.dtype))
    return dict(zip(inputs, grads, strict=True))


def random_cotangent(keys: int, heads: int, dtype: torch.dtype, device: str) -> Tensor:
    """The gradient that arrives at the output, (1, heads, keys, head dim)."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(1, heads, keys, HEAD_DIM, generator=g).to(device=device, dtype=dtype)


def gradient_errors(keys: int, dtype: torch.dtype, strength: float, device: str) -> dict[str, dict[str, float]]:
    """Errors of every gradient by implementation; the norm is taken over all heads together."""
    heads = max(2, min(16, 2**15 // keys))
    x = inputs(keys, keys, heads, dtype, strength, device)
    cotangent = random_cotangent(keys, heads, dtype, device)
    exact = by_head(x, "reference", cotangent)
    results = {impl: gradients(x, impl, cotangent) for impl in implementations(device)}
    plain = plain_gradient_errors(keys, heads, dtype, device)
    return {
        quantity: {"plain": plain.get(name, float("nan"))}
        | {impl: error(grads[name], exact[name]) for impl, grads in results.items()}
        for quantity, name in GRADIENTS.items()
    }


@cache
def plain_gradient_errors(keys: int, heads: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """The errors of dq, dk and dv of attention without a bias, which no strength of the gates changes."""
    x = {name: t for name, t in inputs(keys, keys, heads, dtype, 1, device).items() if name in "qkv"}
    cotangent = random_cotangent(keys, heads, dtype, device)
    exact = by_head(x, None, cotangent)
    return {name: error(grad, exact[name]) for name, grad in gradients(x, None, cotangent).items()}


def by_head(x: dict[str, Tensor], impl: str | None, cotangent: Tensor) -> dict[str, Tensor]:
    """Gradients in float64, a head and some of its queries at a time so that dense logits fit."""
    results: dict[str, list[Tensor]] = {}
    for h in range(cotangent.size(1)):
        part = {n: t[h : h + 1] if n == "amplitude" else t[:, h : h + 1] for n, t in exactly(x).items()}
        for name, grad in by_rows(part, impl, cotangent[:, h : h + 1].double()).items():
            results.setdefault(name, []).append(grad)
    return {name: torch.cat(grads, dim=0 if name == "amplitude" else 1) for name, grads in results.items()}


def by_rows(x: dict[str, Tensor], impl: str | None, cotangent: Tensor) -> dict[str, Tensor]:
    """Gradients as the sum over groups of queries, each with the keys up to its last: `PAIRS` logits at a time."""
    keys = cotangent.size(2)
    rows = max(1, PAIRS // keys)
    results = {name: torch.zeros_like(t) for name, t in x.items() if impl is not None or name in "qkv"}
    for start in range(0, keys, rows):
        stop = min(start + rows, keys)
        parts = {"q": slice(start, stop), "gate": slice(start, stop), "amplitude": slice(None)}
        part = {n: t[parts[n]] if n == "amplitude" else t[:, :, parts.get(n, slice(stop))] for n, t in x.items()}
        for name, grad in gradients(part, impl, cotangent[:, :, start:stop]).items():
            whole = results[name] if name == "amplitude" else results[name][:, :, parts.get(name, slice(stop))]
            whole += grad
    return results


def measure(device: str, quick: bool) -> Iterator[Row]:
    """The rows of this device, as they come; gradients of long sequences want a GPU."""
    origin = run_info.stamp(torch.device(device))
    stamp = {name: origin[name] for name in FIELDS[:3]}
    most = 8192 if quick else 131072
    lengths = [n for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072) if n <= most]
    for label, dtype in DTYPES.items():
        for keys in lengths:
            for strength in STRENGTHS:
                errors = output_errors(keys, dtype, strength, device)
                yield _row(stamp, "output", label, keys, strength, errors)
        longest = 2048 if quick else 131072 if device == "cuda" else 8192
        for keys in [n for n in lengths if n <= longest]:
            for strength in STRENGTHS:
                for quantity, errors in gradient_errors(keys, dtype, strength, device).items():
                    yield _row(stamp, quantity, label, keys, strength, errors)


def _row(stamp: Row, quantity: str, dtype: str, keys: int, strength: float, errors: dict[str, float]) -> Row:
    numbers = {impl: "" if value != value else f"{value:.2e}" for impl, value in errors.items()}  # noqa: PLR0124
    return stamp | {"quantity": quantity, "dtype": dtype, "keys": str(keys), "strength": str(strength)} | numbers


def load(root: Path = Path()) -> list[Row]:
    """The stored rows of a clone; columns that came later are empty in earlier rows."""
    return [dict.fromkeys(FIELDS, "") | row for row in common.load(root / ROWS)]


def save(rows: list[Row]) -> None:
    """Replace the stored rows of these rows' device."""
    devices = {row["device"] for row in rows}
    kept = [row for row in load() if row["device"] not in devices] if ROWS.exists() else []
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    temporary = ROWS.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + rows, key=lambda row: row["device"]))
    temporary.replace(ROWS)


def verdict(rows: list[Row]) -> list[str]:
    """What the operator promises, and whether these rows keep it; each broken promise is a line."""
    broken = []
    for row in rows:
        for impl in ("split", "anchored", "triton"):
            if not row.get(impl):
                continue
            where = f"{row['quantity']} {row['dtype']} {row['keys']} keys Γg {row['strength']}: {impl} {row[impl]}"
            if row["quantity"] not in GATES:
                if float(row[impl]) > 2 * float(row["plain"]):
                    broken.append(f"{where}, more than twice plain attention's {row['plain']}")
            elif _limits(impl, row) and float(row[impl]) >= 0.02:
                broken.append(f"{where}, not under 2%")
    return broken


def _limits(impl: str, row: Row) -> bool:
    """Whether a gate gradient is promised to 2%: of `triton` at every length, of the others at training lengths.

    The amplitude's is one sum over all queries. Under strong gates its terms cancel, and what is left may be small
    beside what each of them lost.
    """
    mild = int(row["strength"]) <= 10
    if impl == "triton":
        return mild or row["quantity"] != "damplitude"
    return mild and int(row["keys"]) <= 2048


def main(
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Outputs to 8,192 keys, gradients to 2,048.")] = False,
    keep: Annotated[bool, typer.Option("--save/--no-save", help="Keep rows in place of those of this device.")] = False,
    trust: common.Trust = False,
) -> None:
    """Measure errors of every implementation against float64; leaves with 1 if one is larger than promised."""
    if keep and quick:
        raise ValueError("save: keeps whole tables, leave out --quick")
    if keep and not DATA.is_dir():
        raise ValueError(f"save: there is no {DATA} here, expected the root of a clone")
    place, log, rows = pick_device(device), Progress().log, list[Row]()
    common.run_tests("precision", trust=trust)
    for row in measure(place.type, quick):
        rows.append(row)
        log(" ".join(row.get(field, "") for field in FIELDS[3:]))
    common.show("error against float64", rows, FIELDS[3:])
    if keep:
        save(rows)
    broken = verdict(rows)
    typer.echo(
        "\n".join(broken)
        or "outputs, dq, dk and dv within twice plain attention's error, gate gradients under 2% where promised"
    )
    if broken:
        raise typer.Exit(1)


if __name__ == "__main__":
    common.script(main)
