"""`gape hf extend`: one command from a model to the same model at many times its context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gape.cli.options import INTS, Device, Precision, numbers


def extend(
    model: Annotated[str, typer.Argument(help="A directory, or a name on the Hugging Face hub; without gates.")],
    data: Annotated[list[str], typer.Argument(help="A corpus of gape data prepare, or files and folders of text.")],
    to: Annotated[int, typer.Option(help="Tokens that it should read.")],
    out: Annotated[Path, typer.Option(help="Directory of everything; the model goes to model/ in it.")],
    method: Annotated[str, typer.Option(help="ours; yarn, nope, floors or plain to compare with.")] = "ours",
    steps: Annotated[int, typer.Option(help="Updates of the tuning.")] = 300,
    length: Annotated[int | None, typer.Option(help="Tokens of a training window; the native context or 4096.")] = None,
    long_steps: Annotated[int, typer.Option(help="Updates of a second phase, in longer windows; 0: none.")] = 220,
    long_length: Annotated[int | None, typer.Option(help="Tokens of its windows; --to or 65536.")] = None,
    update_tokens: Annotated[int, typer.Option(help="Tokens of an update.")] = 65536,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows at once; by default as many tokens as a long window has.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Highest rate; a cosine takes it down to a tenth.")] = 3e-4,
    free: Annotated[int | None, typer.Option(help="Key heads without a floor; about one in six by default.")] = None,
    plan: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of gape.hf.plan_floors, such as least=64; may be repeated.")
    ] = None,
    sinks: Annotated[bool, typer.Option(help="Landmarks keep the first token in view of heads with a floor.")] = True,
    log_scale: Annotated[bool, typer.Option(help="Logits grow with the logarithm of the length.")] = False,
    floors: Annotated[Path | None, typer.Option(help="JSON file with gate_floor, for --method floors.")] = None,
    factor: Annotated[float | None, typer.Option(help="Of YaRN, for --method yarn; as far as --to by default.")] = None,
    recall: Annotated[float, typer.Option(help="Share of windows with facts put in and asked for at the end.")] = 0.7,
    recall_weight: Annotated[float, typer.Option(help="Weight of the tokens of their answers in the loss.")] = 16.0,
    skip_to: Annotated[
        int, typer.Option(help="Half of the first phase's windows skip positions, up to this one; 0 skips none.")
    ] = 0,
    keep: Annotated[float, typer.Option(help="Share of windows with the model's own answers to short prompts.")] = 0.1,
    lora: Annotated[int, typer.Option(help="Rank of LoRA matrices that learn in place of the weights; 0: none.")] = 0,
    lengths: Annotated[
        str | None, typer.Option(metavar=INTS, help="Tokens at which it is measured; doubling up to --to by default.")
    ] = None,
    needles: Annotated[str | None, typer.Option(help="Folder of gape ruler generate; made here by default.")] = None,
    samples: Annotated[int, typer.Option(help="Needles of a task and length that are made here; 0: none.")] = 16,
    windows: Annotated[int, typer.Option(help="Windows of a perplexity.")] = 16,
    prompts: Annotated[int, typer.Option(help="Short prompts whose answers are compared; 0: none.")] = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the time of a token is the mean of.")] = 64,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    heldout_fraction: Annotated[
        float, typer.Option(help="Where DATA is text: share of its documents held out.")
    ] = 0.05,
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the gates, the order of the data and the answers.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, how long; write nothing.")
    ] = False,
) -> None:
    """Make a model read, and find, at many times its context; measure it before and after. Stop it as you like."""
    from gape.cli.hf import values  # noqa: PLC0415
    from gape.experiments.experiment import pick_device, wants_bfloat16  # noqa: PLC0415
    from gape.experiments.extend import Job, perform  # noqa: PLC0415
    from gape.experiments.extend_settings import Settings  # noqa: PLC0415

    settings = Settings(
        model=model, data=tuple(data), to=to, method=method, steps=steps, length=length, long_steps=long_steps,
        long_length=long_length, update_tokens=update_tokens, batch_size=batch_size, learning_rate=learning_rate,
        free=free, plan=values("plan", plan), sinks=sinks, log_scale=log_scale,
        floors=None if floors is None else str(floors), factor=factor, recall=recall, recall_weight=recall_weight,
        skip_to=skip_to, keep=keep, lora=lora, needles=needles, samples=samples, windows=windows, prompts=prompts,
        lengths=None if lengths is None else numbers("lengths", lengths, int, "1024,4096"),
        gradient_checkpointing=gradient_checkpointing, heldout_fraction=heldout_fraction,
        checkpoint_every=checkpoint_every, new_tokens=new_tokens, seed=seed,
    )  # fmt: skip
    target = pick_device(device)
    wants_bfloat16(precision, target)
    if dry_run:
        from gape.experiments.extend_dry_run import describe  # noqa: PLC0415

        typer.echo(describe(Job(settings, out, target, precision)))
        return
    typer.echo(perform(settings, out, device=device, precision=precision))
