"""`gradleak score`: new metrics on stored guesses."""

from functools import partial
from typing import Annotated

from gradleak.cli.command import Device, RecordPath, open_terminal, option, resolve_device
from gradleak.core.errors import GradleakError
from gradleak.report.numbers import write_interval, write_number


def score(
    run: RecordPath,
    metric: Annotated[
        list[str] | None,
        option("Metric to add; repeat for several. `gradleak list metrics` names them."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Adds metrics to records without attacking again.

    Secrets are read again from the data and must have the hashes that the records hold; the
    folder's key is needed for that. Guesses are cut into tokens again, from their text; blind ones
    are drawn again (of pictures they are left out where the generator is gone).
    """
    from gradleak.audit import rescore
    from gradleak.audit.spec import read
    from gradleak.core.metric import Metric
    from gradleak.records.store import read_record, record_paths, rewrite_record
    from gradleak.study.private_data import SecretFinder

    if not metric:
        raise GradleakError("Name a metric to add: --metric semantic_similarity.")
    metrics = [read("metric", one, Metric) for one in metric]
    where, finder = resolve_device(device), SecretFinder(run, network=True)
    console = open_terminal()
    for path in record_paths(run):
        record = read_record(path)
        scored = rescore(
            record,
            finder.require(record, path),
            metrics,
            where,
            partial(console.print, soft_wrap=True),
        )
        rewrite_record(path, scored)
        for one in metrics:
            worst = scored.worst_case[one.name]
            console.print(
                f"{path.name}: {one.name} {write_interval(worst)}, blind"
                f" {write_number(worst.blind, worst.unit)}, n = {worst.n}",
                soft_wrap=True,
            )
