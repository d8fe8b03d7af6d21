"""`gradleak prior`: train, pack and judge a language model, or a generator of pictures, of your
own for the attacker."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradleak.cli.command import Device, PlainHelp, option, resolve_device
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

prior_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Trains, packs and evaluates priors."
)
Corpus = Annotated[
    list[Path],
    option(
        "Text files, one sentence a line; .gz, .xz and .bz2 are read too. Repeat for several.",
        "--corpus",
    ),
]


@prior_app.command(cls=PlainHelp)
def train(
    corpus: Corpus,
    out: Annotated[Path, option("Folder for the model, in Hugging Face format.")],
    tokenizer: Annotated[
        str, option("Whose vocabulary: a target's name, a hub id or a folder. [minilm]")
    ] = "minilm",
    width: Annotated[int, option("Hidden size. [320]")] = 320,
    layers: Annotated[int, option("Layers. [6]")] = 6,
    heads: Annotated[int, option("Attention heads. [5]")] = 5,
    epochs: Annotated[int, option("Passes over the text. [6]")] = 6,
    tokens_a_batch: Annotated[int, option("Tokens in a batch. [32768]")] = 32_768,
    learning_rate: Annotated[float, option("At its peak. [0.002]")] = 2e-3,
    seed: Annotated[int, option("Of weights and order. [0]")] = 0,
    device: Device = "auto",
) -> None:
    """Trains a causal language model over a target's vocabulary; interrupted, the same command
    goes on from the last epoch."""
    import torch

    from gradleak.training.language_model_prior import PriorTraining, read_corpus, train_prior

    feed_forward = int(width * 2.7) // 32 * 32
    settings = PriorTraining(
        width, layers, heads, feed_forward, 64, epochs, tokens_a_batch, learning_rate, seed=seed
    )
    words = _tokenizer(tokenizer)
    text = read_corpus(corpus, words, settings.longest)
    typer.echo(
        f"{text.tokens} tokens for training, {sum(t.numel() for t in text.held_out.values())}"
        " held out",
        err=True,
    )
    for news in train_prior(settings, text, words, out, torch.device(resolve_device(device))):
        typer.echo(
            "  ".join(f"{name} {value:.4g}" for name, value in news.items()),
            err="validation" not in news,
        )


@prior_app.command("eval", cls=PlainHelp)
def evaluate(
    prior: Annotated[
        str, typer.Argument(help="A prior, such as english or causal_lm:path=FOLDER.")
    ],
    corpus: Corpus,
    target: Annotated[str, option("Whose vocabulary. [minilm]")] = "minilm",
    limit: Annotated[int, option("Sentences. [2000]")] = 2000,
    device: Device = "auto",
) -> None:
    """Prints the mean nats a token of a prior on the held-out sentences of a corpus."""
    import torch

    from gradleak.audit.spec import read
    from gradleak.core.prior import PriorSpec
    from gradleak.targets import resolve_target
    from gradleak.training.language_model_prior import read_corpus

    opened = resolve_target(target).open(torch.device(resolve_device(device)))
    tables = read_corpus(corpus, _tokenizer(target), 64).held_out
    scorer = read("prior", prior, PriorSpec).open(opened)
    total, tokens, left = 0.0, 0, limit
    for length, table in tables.items():
        ids = table[: max(1, limit * len(table) // sum(map(len, tables.values())))].to(
            opened.device, torch.int64
        )
        nll = scorer.nll(ids, torch.full((len(ids),), length, device=opened.device))
        total, tokens, left = (
            total + float(nll.sum()) * (length - 1),
            tokens + len(ids) * (length - 1),
            left - len(ids),
        )
    typer.echo(
        f"{prior}: {total / tokens:.4f} nats a token over {limit - left} held-out sentences,"
        f" {tokens} tokens"
    )


@prior_app.command(cls=PlainHelp)
def pack(
    folder: Annotated[Path, typer.Argument(help="A trained prior.")],
    out: Annotated[Path, typer.Argument(help="The packed file.")],
    embedding_bits: Annotated[int, option("Of the word embeddings. [5]")] = 5,
    body_bits: Annotated[int, option("Of all other matrices. [6]")] = 6,
) -> None:
    """Writes a trained prior in a few bits a weight, as the shipped one is."""
    from gradleak.priors.english import pack_prior

    typer.echo(f"{out}: {pack_prior(folder, out, embedding_bits, body_bits) / 1e6:.2f} MB")


@prior_app.command(cls=PlainHelp)
def unpack(out: Annotated[Path, typer.Argument(help="A folder to write.")]) -> None:
    """Writes the shipped prior as a Hugging Face folder: to train on, or to audit (--target
    causal_lm:path=FOLDER)."""
    from gradleak.priors.english import english_model

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GradleakError(f"{out} is there already: name a folder that is empty or not there.")
    words = _tokenizer("minilm")
    english_model().save_pretrained(out)
    words.save_pretrained(out)
    typer.echo(
        f"{out}: 6 layers, BERT's uncased vocabulary. Audit it: gradleak audit --target"
        f" causal_lm:path={out}"
    )


@prior_app.command(cls=PlainHelp)
def pictures(
    data: Annotated[
        str,
        option("Public pictures to learn from, such as cifar10:split=train or shapes:part=public."),
    ],
    out: Annotated[Path, option("The generator's file, .safetensors.")],
    limit: Annotated[int | None, option("Pictures. [all]")] = None,
    latents: Annotated[int, option("Numbers a picture is made of. [128]")] = 128,
    width: Annotated[int, option("Channels. [64]")] = 64,
    epochs: Annotated[int, option("Passes over the pictures. [30]")] = 30,
    how: Annotated[
        str,
        option("decoder of an autoencoder, or gan, against an adversary: more epochs. [decoder]"),
    ] = "decoder",
    seed: Annotated[int, option("Of weights, order and noise. [0]")] = 0,
    device: Device = "auto",
) -> None:
    """Trains a generator of pictures, the prior of gi_gip."""
    import torch

    from gradleak.datasets import resolve_dataset
    from gradleak.training.picture_models import (
        RATES,
        GeneratorTraining,
        stack_pictures,
        train_generator,
    )

    if how not in RATES:
        raise GradleakError(f"--how {how}: a generator is trained as {' or '.join(RATES)}.")
    if min(latents, width, epochs) < 1:
        raise GradleakError("latents, width and epochs count from 1.")
    if not out.parent.is_dir():
        raise GradleakError(f"There is no folder {out.parent} to write the generator into.")
    settings = GeneratorTraining(latents, width, epochs, how=how, seed=seed)
    known = stack_pictures(resolve_dataset(data).load(limit))
    typer.echo(f"{len(known)} pictures", err=True)
    for news in train_generator(settings, known, out, torch.device(resolve_device(device))):
        typer.echo("  ".join(f"{name} {value:.4g}" for name, value in news.items()), err=True)
    typer.echo(f"Generator: {out}. Use it with --prior generator:path={out}")


def _tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a target or folder, with its own threads allowed: a corpus is long."""
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # before gradleak.targets turns it off
    from transformers import AutoTokenizer

    from gradleak.core.target import TargetSpec
    from gradleak.targets import resolve_target
    from gradleak.targets.huggingface import HuggingFace
    from gradleak.targets.minilm import MiniLM, installed_folder

    spec: TargetSpec = resolve_target(name)
    if isinstance(spec, MiniLM):
        return AutoTokenizer.from_pretrained(installed_folder())
    if isinstance(spec, HuggingFace):
        return AutoTokenizer.from_pretrained(spec.path)
    from gradleak.targets.tiny import tiny_tokenizer

    return tiny_tokenizer()
