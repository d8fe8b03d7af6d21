"""`gradleak federated`: what leaks from the clients of a run of Flower or NVFlare."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradleak.cli.captured import tell_rebuilt
from gradleak.cli.command import (
    AllowPickle,
    Device,
    Memory,
    Out,
    PlainHelp,
    PriorName,
    Seed,
    open_display,
    open_terminal,
    option,
    print_json,
    resolve_device,
    resolve_memory,
)
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from rich.console import Console

    from gradleak.audit.rounds import AttackedRound
    from gradleak.captures import Federation

federated_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Audits clients of Flower and NVFlare by what they sent.",
)


@federated_app.callback()
def federated() -> None:
    """Audits clients of Flower and NVFlare by what they sent."""


@federated_app.command(cls=PlainHelp)
def audit(
    folder: Annotated[
        Path,
        typer.Argument(help="What CaptureMod, CaptureGrid or CaptureObserver wrote into."),
    ],
    target: Annotated[
        str,
        option("Model that is trained: a name, a hub id or a folder.", "--target", "--model"),
    ] = "minilm",
    truth: Annotated[
        Path | None,
        option(
            "The clients' texts, for scores and records: a jsonl file with text, label, client and"
            " round, or a folder of files client-NAME.csv and client-NAME-round-3.csv."
        ),
    ] = None,
    attack: Annotated[
        list[str] | None, option("Who guesses; repeat for several. [portfolio]")
    ] = None,
    protocol: Annotated[
        str | None,
        option(
            "How clients train: fedavg:steps=4,learning_rate=0.1. [as captured; one step where not"
            " told]"
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        option("Examples of each client, where it did not send their number.", minimum=1),
    ] = None,
    client: Annotated[
        list[str] | None, option("Only this client; repeat for several. [all]")
    ] = None,
    round: Annotated[
        list[int] | None, option("Only this round; repeat for several. [all]", "--round")
    ] = None,
    prior: PriorName = "auto",
    device: Device = "auto",
    memory: Memory = None,
    seed: Seed = 0,
    time_limit: Annotated[
        float | None, option("Seconds for each attack on each round. [none]")
    ] = None,
    out: Out = Path("runs"),
    as_json: Annotated[bool, option("Print what was found as JSON.", "--json")] = False,
    keep_secrets: Annotated[
        bool, option("Store the private texts in the records.", "--keep-secrets")
    ] = False,
    show: Annotated[bool, option("Show guesses here.", "--show")] = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Attacks what each client sent in each round, at the weights that came down to it.

    Without the truth it says how much was rebuilt and is proven. With it each round is a record in
    the folder of --out, for report, show and gate.
    """
    import torch

    from gradleak.audit.rounds import attack_round, group_rounds, list_refusals
    from gradleak.captures import survey_federation
    from gradleak.datasets import read_client_texts
    from gradleak.report.terminal.console import print_indented
    from gradleak.targets import resolve_target

    federation = choose_messages(survey_federation(folder), client or (), round or ())
    rounds, refusals = group_rounds(federation, protocol), list_refusals(federation)
    if not rounds:
        raise GradleakError(" ".join(refusals) or f"No client in {folder} sent any arrays.")
    texts = None if truth is None else read_client_texts(truth)
    display = open_display(quiet=as_json)
    spec, place = resolve_target(target, allow_pickle), resolve_device(device)
    most = resolve_memory(memory)
    display.say(f"Opening {target} on {place}")
    opened = spec.open(torch.device(place))
    finished = []
    for number, one in enumerate(rounds, 1):
        display.say(f"Attacking round {one.round} ({number} of {len(rounds)})")
        finished.append(
            attack_round(
                federation, one, opened, spec, texts,
                attacks=attack, prior=prior, seed=seed, batch_size=batch_size,
                time_limit=time_limit, memory=most, out=out, keep_secrets=keep_secrets,
            )
        )  # fmt: skip
    if as_json:
        described = [describe_round(one, show) for one in finished]
        print_json({"rounds": described, "refused": refusals, "beside": list_lines(federation)})
        return
    console = open_terminal()
    print_rounds(console, finished, show)
    for sentence in [*refusals, *list_lines(federation)]:
        print_indented(console, "- ", sentence)
    if texts is not None:
        print_scores(console, finished, out)


def choose_messages(
    federation: "Federation", clients: Sequence[str], rounds: Sequence[int]
) -> "Federation":
    """Returns what these clients sent in these rounds; none named is all."""
    held = federation.messages
    names, numbers = {one.header.client for one in held}, {one.header.round for one in held}
    if strange := [name for name in clients if name not in names]:
        raise GradleakError(
            f"There is no client {strange[0]} in {federation.folder}, which has"
            f" {', '.join(sorted(names))}."
        )
    if odd := [number for number in rounds if number not in numbers]:
        raise GradleakError(f"There is no round {odd[0]} in {federation.folder}.")
    chosen = [
        one
        for one in held
        if (not clients or one.header.client in clients)
        and (not rounds or one.header.round in rounds)
    ]
    return replace(federation, messages=tuple(chosen))


def print_rounds(console: "Console", finished: "Sequence[AttackedRound]", show: bool) -> None:
    """Prints, for each round and client, how much was rebuilt, and how sure that is."""
    for one in finished:
        # `Round 2, fedavg:steps=1,learning_rate=0.5, client_dp:clip=1`
        heading = ", ".join([f"Round {one.of.round}", one.of.protocol, *one.of.defenses])
        console.print(heading, style="bold", soft_wrap=True)
        for update, client in enumerate(one.of.clients):
            guesses = [guess for guess in one.found if guess.update == update]
            told = tell_rebuilt(guesses)
            if guesses and guesses[0].explains is not None:
                told += f", {guesses[0].explains:.1%} of it explained"
            console.print(f"  client {client}: {told}.", markup=False, soft_wrap=True)
            for guess in guesses if show else ():
                console.print(f"    {guess.place + 1}. {guess.text}", markup=False, soft_wrap=True)


def list_lines(federation: "Federation") -> list[str]:
    """Returns, in sentences, what left beside the arrays, and what the platform says of itself."""
    from gradleak.audit.rounds import list_applied, list_beside, list_budgets

    headers = [message.header for message in federation.messages]
    names, applied, budgets = (
        list(dict.fromkeys(one for header in headers for one in list_of(header)))
        for list_of in (list_beside, list_applied, list_budgets)
    )
    said = []
    if names:
        said.append(
            f"Beside the arrays left: {', '.join(names)}. These leak too, and are not scored."
        )
    if applied:
        said.append(f"On the clients ran: {', '.join(applied)}.")
    return said + [f"The platform says of its own privacy: {one}." for one in budgets]


def print_scores(console: "Console", finished: "Sequence[AttackedRound]", out: Path) -> None:
    """Prints who leaks most and how leak changes, and where the records are."""
    from gradleak.records.store import Summary
    from gradleak.report.page.clients import list_client_leaks, tell_clients

    records = [one.record for one in finished if one.record is not None]
    summaries = [Summary.of(out / f"{record.id}.json", record) for record in records]
    leaks = list_client_leaks(summaries)
    for one in leaks:
        console.print(
            f"Client {one.client}, round {one.round}: {one.whole} of {one.texts} word for word,"
            f" ROUGE-1 {100 * one.score:.1f} (blind {100 * one.blind:.1f}), {one.proven} proven.",
            markup=False,
            soft_wrap=True,
        )
    for sentence in tell_clients(leaks):
        console.print(sentence, markup=False, soft_wrap=True)
    for summary in summaries:
        console.print(f"Record: {summary.path}", soft_wrap=True)
    console.print(f"Report: gradleak report {out}", soft_wrap=True)


def describe_round(one: "AttackedRound", show: bool) -> dict[str, Any]:
    """Returns what was found of a round as JSON has it, guesses only where they may be shown."""
    names = ("update", "place", "attack", "certified", "explains", *(["text"] * show))
    return {
        "round": one.of.round,
        "clients": list(one.of.clients),
        "protocol": one.of.protocol,
        "defenses": list(one.of.defenses),
        "guesses": [{name: getattr(guess, name) for name in names} for guess in one.found],
        "record": None if one.record is None else one.record.id,
    }
