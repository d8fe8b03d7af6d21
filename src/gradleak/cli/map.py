"""`gradleak map`: which module of which layer leaks most."""

from pathlib import Path
from typing import Annotated

from gradleak.cli.command import (
    BatchSize,
    Device,
    Know,
    Memory,
    PriorName,
    PrivateData,
    Seed,
    TargetName,
    open_display,
    open_terminal,
    option,
    resolve_device,
    resolve_memory,
)

MODULES = "whole,query,key,value,attention_output,ffn_in,ffn_out"
MODULE_LIST = MODULES.replace(",", ", ")  # which breaks between names where lines end


def leak_map(
    target: TargetName = "minilm",
    data: PrivateData = "canaries",
    attack: Annotated[str, option("Who guesses, from each part alone. [energy]")] = "energy",
    limit: Annotated[int, option("Client batches to attack. [20]")] = 20,
    batch_size: BatchSize = 1,
    layers: Annotated[str, option("Rows: all, 5, 3-6 or 1,4-6. [all]")] = "all",
    modules: Annotated[
        str,
        option(
            "Columns, with commas; whole is all of a layer; layernorm and bias too."
            f" [{MODULE_LIST}]"
        ),
    ] = MODULES,
    metric: Annotated[
        str, option("What is drawn; the usual ones are all kept. [rouge1]")
    ] = "rouge1",
    know: Know = None,
    prior: PriorName = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    memory: Memory = None,
    out: Annotated[
        Path, option("Folder for records, map.json and heat_map.svg. [runs/map]")
    ] = Path("runs/map"),
    show: Annotated[
        bool,
        option("Show guesses while the attack runs; of made-up texts they always are.", "--show"),
    ] = False,
) -> None:
    """Attacks every layer and module on its own and draws the map: which leaks most, with what
    share of the parameters.

    Every cell is an audit with a record; the same command again takes those that are there.
    """
    from gradleak.report.terminal.map_and_tradeoff import print_heat_map
    from gradleak.study.leak_map import FILE, PICTURE, MapIncomplete, plan_map, run_map

    columns = [word.strip() for word in modules.split(",") if word.strip()]
    settings = {
        "target": target,
        "data": data,
        "limit": limit,
        "batch_size": batch_size,
        "prior": prior,
        "seed": seed,
        **({"know": know} if know else {}),
    }
    plan = plan_map(attack, layers, columns, metric, settings)
    display = open_display(show_guesses=show or plan.base.data.made_up)
    incomplete: MapIncomplete | None = None
    try:
        heat_map = run_map(plan, out, resolve_device(device), display, resolve_memory(memory))
    except MapIncomplete as error:
        heat_map, incomplete = error.heat_map, error
    console = open_terminal()
    print_heat_map(console, heat_map)
    console.print(
        f"Map: {out / FILE}, picture: {out / PICTURE}, a record for each cell beside them.",
        soft_wrap=True,
    )
    if incomplete is not None:
        raise incomplete
