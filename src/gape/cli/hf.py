"""`gape hf`: put GAPE into models of transformers, take it out, fine-tune and measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gape.cli import lm
from gape.cli.options import INTS, Device, Precision, Resume, numbers

app = typer.Typer(help="Models of transformers.", no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[str, typer.Argument(help="A directory, or a name on the Hugging Face hub.")]
Out = Annotated[Path, typer.Option(help="Directory of the model that is written; it must not hold one yet.")]
Length = Annotated[int | None, typer.Option(help="T, the length the model is (or will be) trained at.")]
Start = Annotated[str, typer.Option(help="identity: begin with the model's own logits. paper: with an amplitude of 1.")]
Dry = Annotated[bool, typer.Option("--dry-run", help="Only print parameters added, cost and backend; write nothing.")]
Seed = Annotated[int, typer.Option(help="Of the gates' first values, a number from 0.")]
Gate = Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the gates, such as gate_floor=4; may be repeated.")]
Option = Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the scheme, such as factor=8; may be repeated.")]
LearningRate = Annotated[float, typer.Option(help="Highest rate; a cosine takes it down to a tenth.")]
Checkpointing = Annotated[bool, typer.Option(help="Less memory, more time.")]
Recall = Annotated[float, typer.Option(help="Share of windows with facts put in and asked for at the end.")]
RecallWeight = Annotated[float, typer.Option(help="Weight of the tokens of their answers in the loss.")]
Lora = Annotated[int, typer.Option(help="Rank of LoRA matrices that learn in place of the weights; 0: none.")]
Heldout = Annotated[float, typer.Option(help="Where DATA is text: share of its documents held out.")]
Attention = Annotated[
    str | None, typer.Option(help="attn_implementation, such as gape_triton; the model's own by default.")
]


@app.command("import")
def bring(
    file: Annotated[Path, typer.Argument(help="A GGUF file, or model.bin of llama2.c.")],
    out: Out,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.bin of llama2.c, where it does not follow the weights in FILE.")
    ] = None,
) -> None:
    """Save a model that comes in another format as transformers knows it, with its tokenizer."""
    from gape.experiments import finetune  # noqa: PLC0415

    finetune.bring(file, out, tokenizer)


@app.command()
def inject(
    model: Model,
    out: Out,
    context_length: Length = None,
    position: Annotated[
        str | None, typer.Option(help="p-rope+gape, nope+gape, …; the model's own positions with gates by default.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar=INTS, help="Which layers, such as 0,1,-1; all by default.")
    ] = None,
    start: Start = "identity",
    gate: Gate = None,
    floors: Annotated[Path | None, typer.Option(help="JSON file with gate_floor by layer, in place of --gate.")] = None,
    option: Option = None,
    seed: Seed = 0,
    dry_run: Dry = False,
) -> None:
    """Put gates into a model and save it."""
    from gape.experiments import finetune  # noqa: PLC0415

    chosen = None if layers is None else numbers("layers", layers, int, "0,1,2")
    gates = values("gate", gate)
    finetune.retrofit(
        model, out, context_length=context_length, position=position, layers=chosen, start=start, seed=seed,
        gates=gates if floors is None else finetune.with_floors(gates, floors),
        options=values("option", option), dry_run=dry_run,
    )  # fmt: skip


@app.command()
def remove(model: Model, out: Out) -> None:
    """Take the gates out of a model and save it as transformers knows it."""
    from gape.experiments import finetune  # noqa: PLC0415

    finetune.strip(model, out)


@app.command("finetune")
def train(
    model: Model,
    data: Annotated[list[str], typer.Argument(help="A corpus of gape data prepare, or files and folders of text.")],
    out: Annotated[Path, typer.Option(help="Directory of the run; the model goes to model/ in it.")],
    length: Annotated[int, typer.Option(help="Tokens of a training window.")] = 1024,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Windows of a micro-batch.")] = 8,
    accumulation: Annotated[int, typer.Option(help="Micro-batches of an update.")] = 1,
    learning_rate: LearningRate = 1e-4,
    gate_rate: Annotated[float, typer.Option(help="Rate of the gates, in multiples of --learning-rate.")] = 10.0,
    warmup: Annotated[int, typer.Option(help="Updates in which the rate rises to --learning-rate.")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Of weight matrices; gates are never decayed.")] = 0.0,
    learn: Annotated[str, typer.Option(help="What learns: gates, gates+qk or all.")] = "all",
    heldout_fraction: Heldout = 0.05,
    validate_every: Annotated[int, typer.Option(help="Updates between validations; 0 never validates.")] = 100,
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 500,
    gradient_checkpointing: Checkpointing = False,
    recall: Recall = 0.0,
    recall_weight: RecallWeight = 4.0,
    skip_to: Annotated[
        int, typer.Option(help="Half of the windows skip positions at random, up to this one; 0 skips none.")
    ] = 0,
    shard: Annotated[bool, typer.Option("--shard", help="Under torchrun, shard the model (FSDP2).")] = False,
    context_parallel: Annotated[int, typer.Option(help="Under torchrun, processes that share a window.")] = 1,
    attention: Attention = None,
    variant: Annotated[str, typer.Option(help="Name in tables that tells the run from others of its scheme.")] = "",
    lora: Lora = 0,
    seed: Annotated[int, typer.Option(help="Of the order of the data, a number from 0.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    resume: Resume = "auto",
) -> None:
    """Fine-tune a model on text, with gates or without. Stop it and start it again as you like."""
    from gape.data import RecallConfig  # noqa: PLC0415
    from gape.experiments import finetune  # noqa: PLC0415
    from gape.train import TrainConfig  # noqa: PLC0415

    config = TrainConfig(
        max_steps=steps, learning_rate=learning_rate, min_learning_rate=learning_rate / 10, warmup_steps=warmup,
        weight_decay=weight_decay, gate_lr_multiplier=gate_rate, accumulation=accumulation, seed=seed,
        # transformers draws a mask tensor for every call inside a compiled graph; without, no mask is needed.
        precision=precision, compile="off", validate_every=validate_every, stop_after_perfect=0,
        checkpoint_every=checkpoint_every, keep_last=1, shard=shard, context_parallel=context_parallel,
    )  # fmt: skip
    written = finetune.finetune(
        model, data, out, config, length=length, batch_size=batch_size, learn=learn, device=device, resume=resume,
        heldout_fraction=heldout_fraction, gradient_checkpointing=gradient_checkpointing, attention=attention,
        variant=variant, recall=RecallConfig(share=recall, weight=recall_weight, skip_to=skip_to),
        lora=lora,
    )  # fmt: skip
    typer.echo(written)


# Beyond a chunk, models of transformers take mask tensors.
lm.add_perplexity(app, contexts="512,1024,2048,4096", chunk=65536)


@app.command()
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
        int | None, typer.Option(help="Windows at once; by default the tokens of a long window, 16,384 at least.")
    ] = None,
    learning_rate: LearningRate = 3e-4,
    free: Annotated[int | None, typer.Option(help="Key heads without a floor; about one in six by default.")] = None,
    plan: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of gape.hf.plan_floors, such as least=64; may be repeated.")
    ] = None,
    sinks: Annotated[bool, typer.Option(help="Landmarks keep the first token in view of heads with a floor.")] = True,
    log_scale: Annotated[bool, typer.Option(help="Logits grow with the logarithm of the length.")] = False,
    floors: Annotated[Path | None, typer.Option(help="JSON file with gate_floor, for --method floors.")] = None,
    factor: Annotated[float | None, typer.Option(help="Of YaRN, for --method yarn; as far as --to by default.")] = None,
    recall: Recall = 0.7,
    recall_weight: RecallWeight = 16.0,
    skip_to: Annotated[
        int, typer.Option(help="Half of the first phase's windows skip positions, up to this one; 0 skips none.")
    ] = 0,
    keep: Annotated[float, typer.Option(help="Share of windows with the model's own answers.")] = 0.1,
    lora: Lora = 0,
    lengths: Annotated[
        str | None, typer.Option(metavar=INTS, help="Tokens at which it is measured; doubling up to --to by default.")
    ] = None,
    needles: Annotated[str | None, typer.Option(help="Folder of gape ruler generate; made here by default.")] = None,
    samples: Annotated[int, typer.Option(help="Needles of a task and length that are made here; 0: none.")] = 16,
    windows: Annotated[int, typer.Option(help="Windows of a perplexity.")] = 16,
    prompts: Annotated[int, typer.Option(help="Short prompts whose answers are compared; 0: none.")] = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the time of a token is the mean of.")] = 64,
    gradient_checkpointing: Checkpointing = False,
    heldout_fraction: Heldout = 0.05,
    checkpoint_every: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the gates, the order of the data and the answers.")] = 0,
    device: Device = "auto",
    precision: Precision = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, how long; write nothing.")
    ] = False,
) -> None:
    """Make a model read, and find, at many times its context; measure it before and after. Stop it as you like."""
    # All others are settings by the same name.
    options = {name: v for name, v in locals().items() if name not in ("out", "device", "precision", "dry_run")}
    from gape.experiments.experiment import pick_device, wants_bfloat16  # noqa: PLC0415
    from gape.experiments.extend import Job, perform  # noqa: PLC0415
    from gape.experiments.extend_settings import Settings  # noqa: PLC0415

    parsed: dict[str, Any] = {"data": tuple(data), "plan": values("plan", plan)}
    parsed |= {"floors": None if floors is None else str(floors)}
    parsed |= {"lengths": None if lengths is None else numbers("lengths", lengths, int, "1024,4096")}
    settings = Settings(**(options | parsed))
    target = pick_device(device)
    wants_bfloat16(precision, target)
    if dry_run:
        from gape.experiments.extend_dry_run import describe  # noqa: PLC0415

        typer.echo(describe(Job(settings, out, target, precision)))
        return
    typer.echo(perform(settings, out, device=device, precision=precision))


def values(name: str, texts: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE of an option of that name, the values as in a recipe."""
    from gape.utils.settings import override  # noqa: PLC0415

    for text in texts or []:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise ValueError(f"{name}: got {text!r}, expected KEY=VALUE")
    return dict(override(text) for text in texts or [])
