"""What a gate found as JUnit XML and as SARIF, for machines that collect such files."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

NOT_IN_XML = re.compile(
    "[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"
)  # a traceback may hold colours


class Judged(Protocol):
    """One check of a gate."""

    @property
    def setting(self) -> str: ...
    @property
    def records(self) -> tuple[Path, ...]: ...
    @property
    def rule(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def passed(self) -> bool: ...
    @property
    def message(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def waived(self) -> str | None: ...


def write_junit(findings: Sequence[Judged]) -> str:
    """Writes a test case for each setting and bound or reason; what was waived is skipped."""
    failed = str(sum(not finding.passed and finding.waived is None for finding in findings))
    skipped = str(sum(finding.waived is not None for finding in findings))
    suite = ET.Element(
        "testsuite",
        name="gradleak gate",
        tests=str(len(findings)),
        failures=failed,
        errors="0",
        skipped=skipped,
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
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    written = NOT_IN_XML.sub("?", ET.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{written}\n'


def write_sarif(findings: Sequence[Judged], version: str) -> str:
    """Writes SARIF 2.1.0: a result for each check that failed, at the records it is about.

    What was waived is suppressed.
    """
    failed = [finding for finding in findings if not finding.passed]
    rules = list(dict.fromkeys(finding.rule for finding in findings))
    driver: dict[str, Any] = {
        "name": "gradleak",
        "version": version,
        "rules": [
            {"id": rule, "shortDescription": {"text": f"gradleak gate: {rule}"}} for rule in rules
        ],
    }
    run = {
        "tool": {"driver": driver},
        "results": [_describe_result(finding, rules) for finding in failed],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return (
        json.dumps(
            {"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def _describe_result(finding: Judged, rules: Sequence[str]) -> dict[str, Any]:
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
