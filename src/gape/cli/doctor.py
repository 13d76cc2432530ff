"""`gape doctor`: versions, the device, and what would run here for a model's shape."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated

import typer

from gape.cli.bench import Dim, DType, Heads, KVHeads, device_called
from gape.cli.options import Device

if TYPE_CHECKING:
    import torch

    from gape.bench.inputs import Shape


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
) -> None:
    """Say what would run here for a model's shape, and why not the others."""
    from gape.bench.inputs import Shape  # noqa: PLC0415
    from gape.bench.settings import Settings  # noqa: PLC0415
    from gape.utils.validation import whole  # noqa: PLC0415

    where = device_called(device)
    whole("batch", batch)
    settings = Settings(
        device=where,
        impls=(),
        lengths=(length,),
        dim=dim,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        dtype=dtype,
    )
    for name, value in surroundings(where).items():
        typer.echo(f"{name:12} {value}")
    sizes = {"heads": heads, "kv_heads": settings.kv_heads, "length": length, "dim": dim}
    told = f"batch {batch}, {', '.join(f'{name} {value}' for name, value in sizes.items())}, {dtype}"
    _say(
        f"{told}, {'training' if training else 'inference'}",
        Shape(batch=1, **sizes),
        settings.torch_dtype,
        where,
        training,
    )
    if not training and length > 1:
        _say(f"{told}, one new token", Shape(batch=1, queries=1, **sizes), settings.torch_dtype, where, training)


def surroundings(device: torch.device) -> dict[str, str]:
    """Versions and the device."""
    import torch  # noqa: PLC0415

    import gape  # noqa: PLC0415
    from gape.bench.rows import device_name, installed  # noqa: PLC0415
    from gape.ops.rounding import tf32_allowed  # noqa: PLC0415

    found = {
        "gape": gape.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "device": device_name(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "TF32": "allowed in float32 products" if tf32_allowed() else "off",
        }
    return found


def _say(title: str, shape: Shape, dtype: torch.dtype, device: torch.device, training: bool) -> None:
    """What would run for one shape. The batch does not matter for the choice, so one sample stands for it."""
    import torch  # noqa: PLC0415

    import gape  # noqa: PLC0415
    from gape.bench.candidates import gated  # noqa: PLC0415
    from gape.bench.inputs import CONTEXT_LENGTH, draw, problem  # noqa: PLC0415
    from gape.ops import dispatch  # noqa: PLC0415

    arguments = {name: x.requires_grad_(training) for name, x in draw(shape, "log-normal", dtype, device).items()}
    with torch.set_grad_enabled(training):
        plan = gape.explain(*gated(arguments), context_length=CONTEXT_LENGTH)
        others = dispatch.why_not(problem(arguments))
    typer.echo(f"\n{title}\n  {plan}")
    for name, reason in others.items():
        if name != plan.impl:
            typer.echo(f"  not {name}: {reason}")
