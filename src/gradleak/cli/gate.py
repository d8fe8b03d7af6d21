"""`gradleak gate`: a run held against bounds, for CI."""

from pathlib import Path
from typing import Annotated

import typer

from gradleak.cli.options import option


def gate(
    run: Annotated[
        Path, typer.Argument(help="A record, or a folder of records; all folders below it count.")
    ],
    most: Annotated[
        list[str] | None,
        option("Bound: --max exact_match=0.05, or 5%. Repeat for several.", "--max"),
    ] = None,
    least: Annotated[
        list[str] | None,
        option(
            "Bound for a metric that leaks more the lower it is: --min secret_edit_distance=0.8.",
            "--min",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        option("YAML of a study: each of its cells must have a record, of the data as it is now."),
    ] = None,
    change: Annotated[
        list[str] | None,
        option("With --spec: a field that the run replaced, --set limit=10.", "--set"),
    ] = None,
    accept: Annotated[
        list[str] | None,
        option(
            "A reason that is known and waived: --accept few_examples, or --accept"
            " 'few_examples=all there are'. Repeat."
        ),
    ] = None,
    junit: Annotated[Path | None, option("Write the checks as JUnit XML.")] = None,
    sarif: Annotated[Path | None, option("Write what failed as SARIF 2.1.0.")] = None,
) -> None:
    """Exits with 4 unless all that was meant is there, and every setting is shown to leak no more
    than the bounds.

    What counts is the worst case over all attacks on a setting, and of its interval the end that is
    worse (one-sided, 95 %). Shut too, each by its name: cells that are missing, failed, unreadable,
    foreign, outdated (with --spec) or of other_data; flags that make a low score unreliable
    (search_failed, not_adaptive, dead_gradient, no_objective, unmodelled_dropout,
    member_out_of_time, few_examples); only_blind; no_score; names_words; no_bound. A bound of 0.05
    needs 59 examples of which none leaks.
    """
    from gradleak import __version__
    from gradleak.core.errors import GradleakError
    from gradleak.records.files import write_whole
    from gradleak.report import gate_files
    from gradleak.report.terminal.console import open_console, print_indented
    from gradleak.study.contract import read_contract
    from gradleak.study.gate import GateFailed, judge, read_accepted, read_bound

    bounds = [read_bound(one, upper=True) for one in most or ()] + [
        read_bound(one, upper=False) for one in least or ()
    ]
    accepted = [read_accepted(one) for one in accept or ()]
    if change and spec is None:
        raise GradleakError("--set is about a study: name its YAML with --spec.")
    findings = judge(
        run, bounds, accepted, None if spec is None else read_contract(spec, change or ())
    )
    if junit is not None:
        write_whole(junit, gate_files.write_junit(findings))
    if sarif is not None:
        write_whole(sarif, gate_files.write_sarif(findings, __version__))
    console = open_console()
    for finding in findings:
        mark = "pass" if finding.passed else "FAIL" if finding.waived is None else "waived"
        judged = f" ({finding.verdict})" if finding.verdict else ""
        waived = (
            f" Waived by --accept {finding.rule}: {finding.waived}."
            if finding.waived is not None
            else ""
        )
        check = f"{finding.setting}{judged}: {finding.title}. {finding.message}{waived}"
        print_indented(console, f"{mark:8}", check)
    for one in accepted:
        if all(finding.rule != one.rule or finding.waived is None for finding in findings):
            console.print(f"--accept {one.rule} waived nothing.")
    shut = [finding for finding in findings if finding.shuts]
    waivers = list(
        dict.fromkeys(finding.rule for finding in findings if finding.waived is not None)
    )
    said = f" Waived: {', '.join(waivers)}." if waivers else ""
    if shut:
        why = ", ".join(dict.fromkeys(finding.rule for finding in shut))
        raise GateFailed(
            f"The gate is shut: {len(shut)} of {len(findings)} checks failed ({why}).{said}"
        )
    passed = sum(finding.passed for finding in findings)
    whole = (
        ""
        if spec is not None
        else " Whether all cells are there is sure only with --spec study.yaml."
    )
    console.print(
        f"The gate is open: {passed} of {len(findings)} checks passed.{said} It bounds the attacks"
        f" that were run.{whole}"
    )
