"""`gradleak tradeoff`: what leaks under each defense, against what it costs."""

from pathlib import Path
from typing import Annotated

from gradleak.cli.command import (
    BatchSize,
    Device,
    Know,
    Memory,
    PrivateData,
    open_display,
    open_terminal,
    option,
    resolve_device,
    resolve_memory,
)
from gradleak.core.errors import RunFailed

TARGET = "tiny:hidden=64,heads=4"
# Quick rather than strong: span needs seconds and bears some noise; the other adapts to a defense
# and can tell a failed search
ATTACKS = ("span", "lamp_quick:steps=30,starts=10,polish_rounds=1")
DEFENSES = (
    "none",
    "pruning:fraction_kept=0.01",
    "gaussian_noise:std=0.003",
    "gaussian_noise:std=0.03",
    "dp_sgd:noise_multiplier=0.5",
)


def tradeoff(
    defense: Annotated[
        list[str] | None,
        option(
            "A setting to compare; repeat for more. A chain is written 'clipping:clip=1 +"
            " gaussian_noise:std=0.01'. "
            f"[{', '.join(DEFENSES)}]"
        ),
    ] = None,
    target: Annotated[
        str,
        option(
            "Text classifier to audit and to train; the default is small enough for a laptop."
            f" [{TARGET}]"
        ),
    ] = TARGET,
    data: PrivateData = "canaries",
    attack: Annotated[
        list[str] | None,
        option(
            "Who guesses; repeat: the worst case counts. These are quick, portfolio is stronger."
            f" [{' and '.join(ATTACKS)}]"
        ),
    ] = None,
    limit: Annotated[int, option("Client batches to attack. [30]")] = 30,
    batch_size: BatchSize = 1,
    draws: Annotated[
        int, option("Updates of each batch to attack, where a defense is random. [1]")
    ] = 1,
    metric: Annotated[
        str, option("How a leak is read; the usual ones are all kept. [rouge1]")
    ] = "rouge1",
    utility: Annotated[
        str, option("How utility is read: mcc, f1 or accuracy; all are shown. [mcc]")
    ] = "mcc",
    max_leak: Annotated[
        float,
        option(
            "Target: the upper end of the 95 % interval of the gain over blind; 0.05 is 5 %. [0.05]"
        ),
    ] = 0.05,
    train_data: Annotated[
        str | None, option("Labelled examples to train on. [the private data, all of it]")
    ] = None,
    eval_data: Annotated[
        str | None, option("Examples to test on. [the data's dev split, or a third held out]")
    ] = None,
    epochs: Annotated[int, option("Passes over the training data. [20]")] = 20,
    train_batch_size: Annotated[int, option("Examples in a training step. [8]")] = 8,
    learning_rate: Annotated[
        float, option("At the first step; for a pretrained target try 1e-4. [2e-3]")
    ] = 2e-3,
    know: Know = None,
    seed: Annotated[int, option("Of the random streams of audits and trainings. [0]")] = 0,
    device: Device = "auto",
    memory: Memory = None,
    out: Annotated[
        Path, option("Folder for records, tradeoff.json and tradeoff.svg. [runs/tradeoff]")
    ] = Path("runs/tradeoff"),
    show: Annotated[
        bool, option("Show guesses while attacks run; of made-up texts they always are.", "--show")
    ] = False,
) -> None:
    """Audits and fine-tunes a target under each defense, and names the weakest one that meets a
    target.

    Weakest: of the settings whose leak is small enough the one with the best utility. Canaries have
    labels that can be learnt (does the writer ask for something?). Every audit leaves a record,
    every training its scores; the same command again takes those that are there.
    """
    from gradleak.report.terminal.map_and_tradeoff import print_tradeoff
    from gradleak.study.leak_and_utility import FILE, PICTURE, plan_tradeoff, run_tradeoff
    from gradleak.training.fine_tuning import FineTuning

    plan = plan_tradeoff(
        defense or DEFENSES,
        {
            "target": target,
            "data": data,
            "limit": limit,
            "batch_size": batch_size,
            "draws": draws,
            "seed": seed,
            "attacks": attack or list(ATTACKS),
            **({"know": know} if know else {}),
        },
        FineTuning(epochs, train_batch_size, learning_rate, seed=seed),
        train_data=train_data,
        eval_data=eval_data,
        metric=metric,
        utility=utility,
        max_leak=max_leak,
    )
    display = open_display(show_guesses=show or plan.base.data.made_up)
    found = run_tradeoff(plan, out, resolve_device(device), display, resolve_memory(memory))
    console = open_terminal()
    print_tradeoff(console, found)
    console.print(
        f"Result: {out / FILE}, picture: {out / PICTURE}, a record for each audit beside them.",
        soft_wrap=True,
    )
    if found.missing:
        raise RunFailed(
            f"{len(found.missing)} of {len(plan.settings)} settings have no result; the others are"
            " above."
        )
