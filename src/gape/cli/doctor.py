"""`gape doctor`: versions, the device, and what would run here for a model's shape."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.options import Device, Dim, DType, Heads, KVHeads

if TYPE_CHECKING:
    import torch


#: Numbers of q that are made to look at.
LARGEST = 2**32


def doctor(
    heads: Heads = 16,
    kv_heads: KVHeads = None,
    dim: Dim = 64,
    length: Annotated[int, typer.Option(help="Tokens.")] = 4096,
    batch: Annotated[int, typer.Option(help="Samples at once.")] = 1,
    dtype: DType = "bfloat16",
    device: Device = "auto",
    training: Annotated[
        bool, typer.Option("--training", help="With gradients, those of the gates among them.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure for minutes which kernel is the fastest on this GPU, and store it.")
    ] = False,
) -> None:
    """Say what would run here for a model's shape, and why not the others."""
    import torch  # noqa: PLC0415

    from gape.experiments.experiment import pick_device  # noqa: PLC0415
    from gape.utils.validation import invalid_argument, whole  # noqa: PLC0415

    sizes = {"heads": heads, "kv_heads": heads if kv_heads is None else kv_heads, "length": length, "dim": dim}
    for name, size in {"batch": batch, **sizes}.items():
        whole(name, size)
    if heads * length * dim > LARGEST:
        raise invalid_argument("heads, length, dim", f"{heads}, {length}, {dim}", f"a product of up to {LARGEST:,}")
    if heads % sizes["kv_heads"]:
        raise invalid_argument("kv_heads", kv_heads, f"a divisor of heads = {heads}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise invalid_argument("dtype", dtype, "bfloat16, float16 or float32")
    target, kind = pick_device(device), getattr(torch, dtype)
    if tune:
        _tune(target)
        return
    for name, value in surroundings(target).items():
        typer.echo(f"{name:12} {value}")
    shape = f"batch {batch}, {', '.join(f'{name} {value}' for name, value in sizes.items())}, {dtype}"
    typer.echo(f"\n{shape}, {'training' if training else 'inference'}")
    _print_operator(sizes, length, kind, target, training)
    _print_layer(sizes, kind, target, training)
    if not training and length > 1:
        typer.echo(f"\n{shape}, one new token")
        _print_operator(sizes, 1, kind, target, training)


def _tune(device: torch.device) -> None:
    """Measure, and say where the table is; 1 where nothing could be measured."""
    from gape.experiments import dispatch_tuning  # noqa: PLC0415
    from gape.ops.dispatch import VARIABLE  # noqa: PLC0415
    from gape.utils.validation import invalid_argument  # noqa: PLC0415

    if device.type != "cuda":
        raise invalid_argument("--tune", str(device), "a CUDA GPU, to measure kernels on")
    path = dispatch_tuning.tune(device)
    if path is None:
        typer.echo("gape: nothing could be measured, nothing was written", err=True)
        raise typer.Exit(1)
    typer.echo(path)
    if VARIABLE in os.environ:
        typer.echo(f"gape: {VARIABLE} is set: its table counts, not this one", err=True)


def surroundings(device: torch.device) -> dict[str, str]:
    """Versions and the device."""
    import torch  # noqa: PLC0415

    import gape  # noqa: PLC0415
    from gape.ops.columns import tf32_allowed  # noqa: PLC0415
    from gape.utils import run_info  # noqa: PLC0415

    stamp = run_info.stamp(device)
    versions = {"gape": gape.__version__, "python": platform.python_version()}
    versions |= {name: stamp[name] for name in ("torch", "triton", "device")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        versions |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "TF32": "allowed in float32 products" if tf32_allowed() else "off",
            "kernels": _measured(properties.name),
        }
    return versions


def _measured(device: str) -> str:
    """Which table has rules for a GPU."""
    from gape.ops.dispatch import TABLE, VARIABLE, local_table  # noqa: PLC0415
    from gape.ops.implementations import TABLES  # noqa: PLC0415

    if any(rule.device == device for rule in TABLES.here):
        return f"measured here: {local_table(device)}"
    if any(rule.device == device for rule in TABLES.packaged):
        return f"measured, as packaged: {os.environ.get(VARIABLE, TABLE)}"
    return "not measured on this GPU: gape doctor --tune does it in minutes"


def _print_operator(
    sizes: dict[str, int], queries: int, dtype: torch.dtype, device: torch.device, training: bool
) -> None:
    """What the operator would run, and why not the others. The batch does not matter: one sample stands for it."""
    import torch  # noqa: PLC0415

    import gape  # noqa: PLC0415

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device, requires_grad=training)

    heads, kv_heads, keys, dim = sizes.values()
    q, k = zeros(1, heads, queries, dim, dtype=dtype), zeros(1, kv_heads, keys, dim, dtype=dtype)
    gates = zeros(*q.shape[:3]), zeros(*k.shape[:3]), zeros(heads)
    plan = gape.explain(q, k, k, *gates, context_length=keys)
    typer.echo(f"  operator: {plan}")
    for name, reason in plan.others.items():
        typer.echo(f"  not {name}: {reason}")


def _print_layer(sizes: dict[str, int], dtype: torch.dtype, device: torch.device, training: bool) -> None:
    """What an attention layer would run, from its input on."""
    import torch  # noqa: PLC0415

    import gape  # noqa: PLC0415

    heads, kv_heads, tokens, dim = sizes.values()
    # Rotations turn pairs of coordinates.
    position = "nope+gape" if dim % 2 else "p-rope+gape"
    layer = gape.GAPEAttention(heads * dim, heads, kv_heads, context_length=tokens, position=position)
    layer = layer.to(device, dtype).requires_grad_(training)
    typer.echo(f"  layer: {layer.explain(torch.zeros(1, tokens, heads * dim, dtype=dtype, device=device))}")
