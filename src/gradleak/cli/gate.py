"""`gradleak gate`: a run held against bounds, for CI."""

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import option


def gate(
    run: Annotated[Path, typer.Argument(help="A record, or a folder of records.")],
    most: Annotated[list[str] | None, option("Bound: --max exact_match=0.05. Repeat for several.", "--max")] = None,
    least: Annotated[
        list[str] | None, option("Bound for a metric that leaks more the lower it is: --min secret_edit_distance=0.8.", "--min")
    ] = None,
    accept: Annotated[
        list[str] | None, option("A flag that is known and accepted: --accept few_examples. Repeat for several.")
    ] = None,
    junit: Annotated[Path | None, option("Write the checks as JUnit XML.")] = None,
    sarif: Annotated[Path | None, option("Write what failed as SARIF 2.1.0.")] = None,
) -> None:
    """Exits with 4 unless every setting is shown to leak no more than the bounds.

    What counts is the worst case over all attacks on a setting, and of its interval the end that is worse (one-sided, 95 %).
    Flags that make a low score unreliable fail too: search_failed, not_adaptive, dead_gradient, no_objective,
    unmodelled_dropout, few_examples, or no attack but blind. A bound of 0.05 needs 59 examples of which none leaks.
    """
    from gradleak import __version__
    from gradleak.records.files import write_whole
    from gradleak.report import gate_files
    from gradleak.report.layout import open_console
    from gradleak.study.gate import GateFailed, judge, read_bound

    bounds = [read_bound(one, upper=True) for one in most or ()] + [read_bound(one, upper=False) for one in least or ()]
    findings = judge(run, bounds, accept or ())
    if junit is not None:
        write_whole(junit, gate_files.junit(findings))
    if sarif is not None:
        write_whole(sarif, gate_files.sarif(findings, __version__))
    console = open_console()
    for finding in findings:
        mark = "pass" if finding.passed else "FAIL"
        console.print(f"{mark}  {finding.setting}: {finding.title}. {finding.message}", soft_wrap=True)
    failed = [finding for finding in findings if not finding.passed]
    if failed:
        raise GateFailed(f"The gate is shut: {len(failed)} of {len(findings)} checks failed.")
    console.print(f"The gate is open: {len(findings)} of {len(findings)} checks passed. It bounds the attacks that were run.")
