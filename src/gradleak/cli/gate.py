"""`gradleak gate`: a run held against bounds, for CI; what it finds on the terminal, as JUnit XML
and as SARIF."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gradleak import __version__
from gradleak.cli.command import open_terminal, option
from gradleak.core.errors import GradleakError

if TYPE_CHECKING:
    from gradleak.study.gate_checks import GateCheck

# What XML cannot hold: a traceback may hold colours
NOT_IN_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


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
    possible: Annotated[
        list[str] | None,
        option(
            "Bound for what any attack could do, of records that gradleak bound went over:"
            " --max-possible exact_match=0.05; of token_accuracy, exact_match or bits.",
            "--max-possible",
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
    needs 59 examples of which none leaks. With --max-possible alone the attacks do not count; what
    holds under the prior only has to be accepted: --accept prior_dependent.
    """
    from gradleak.records.files import write_whole
    from gradleak.report.terminal.console import print_indented
    from gradleak.study import GateFailed, judge, read_accepted, read_bound, read_contract

    bounds = [
        *(read_bound(one, upper=True) for one in most or ()),
        *(read_bound(one, upper=False) for one in least or ()),
        *(read_bound(one, upper=True, possible=True) for one in possible or ()),
    ]
    accepted = [read_accepted(one) for one in accept or ()]
    if change and spec is None:
        raise GradleakError("--set is about a study: name its YAML with --spec.")
    findings = judge(
        run, bounds, accepted, None if spec is None else read_contract(spec, change or ())
    )
    if junit is not None:
        write_whole(junit, write_junit(findings))
    if sarif is not None:
        write_whole(sarif, write_sarif(findings, __version__))
    console = open_terminal()
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
    shut = [finding.rule for finding in findings if finding.shuts]
    waivers = dict.fromkeys(finding.rule for finding in findings if finding.waived is not None)
    said = f" Waived: {', '.join(waivers)}." if waivers else ""
    if shut:
        raise GateFailed(
            f"The gate is shut: {len(shut)} of {len(findings)} checks failed"
            f" ({', '.join(dict.fromkeys(shut))}).{said}"
        )
    passed = sum(finding.passed for finding in findings)
    whole = (
        ""
        if spec is not None
        else " Whether all cells are there is sure only with --spec study.yaml."
    )
    console.print(
        f"The gate is open: {passed} of {len(findings)} checks passed.{said}"
        f"{' It bounds the attacks that were run.' if most or least else ''}{whole}"
    )


def write_junit(findings: "Sequence[GateCheck]") -> str:
    """Writes a test case for each setting and bound or reason; what was waived is skipped."""
    import xml.etree.ElementTree as ET  # here, since every command would wait for it

    root = ET.Element("testsuites")
    suite = ET.SubElement(
        root,
        "testsuite",
        name="gradleak gate",
        tests=str(len(findings)),
        failures=str(sum(finding.shuts for finding in findings)),
        errors="0",
        skipped=str(sum(finding.waived is not None for finding in findings)),
    )
    for finding in findings:
        case = ET.SubElement(suite, "testcase", classname=finding.setting, name=finding.title)
        if finding.verdict:
            properties = ET.SubElement(case, "properties")
            ET.SubElement(properties, "property", name="verdict", value=finding.verdict)
        if finding.passed:
            ET.SubElement(case, "system-out").text = finding.message
        elif finding.waived is not None:
            ET.SubElement(case, "skipped", message=f"waived ({finding.waived}): {finding.message}")
        else:
            where = "\n".join(map(str, finding.records))
            ET.SubElement(case, "failure", message=finding.message, type=finding.rule).text = where
    ET.indent(root)
    written = NOT_IN_XML.sub("?", ET.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{written}\n'


def write_sarif(findings: "Sequence[GateCheck]", version: str) -> str:
    """Writes SARIF 2.1.0: a result for each check that failed, at the records it is about.

    What was waived is suppressed.
    """
    rules = list(dict.fromkeys(finding.rule for finding in findings))
    described = [
        {"id": rule, "shortDescription": {"text": f"gradleak gate: {rule}"}} for rule in rules
    ]
    run = {
        "tool": {"driver": {"name": "gradleak", "version": version, "rules": described}},
        "results": [_describe_result(one, rules) for one in findings if not one.passed],
    }
    whole = {"$schema": SARIF, "version": "2.1.0", "runs": [run]}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _describe_result(finding: "GateCheck", rules: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": "error",
        "message": {"text": f"{finding.setting}: {finding.message}"},
        "locations": [_locate_record(path) for path in finding.records],
        "properties": {"verdict": finding.verdict},
    }
    if finding.waived is not None:
        result["suppressions"] = [{"kind": "external", "justification": finding.waived}]
    return result


def _locate_record(path: Path) -> dict[str, Any]:
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}}
