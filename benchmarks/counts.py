"""How many words fit what arrived where no noise stands between: docs/bounds.md, by defense.

python benchmarks/counts.py --rows 600-604
"""

import argparse
import time

from gradleak.audit import bound_setting
from gradleak.audit.bounding import ListCache
from gradleak.audit.spec import AuditSpec

DEFENSES = ("sign", "pruning", "top_k", "masking", "quantisation", "rounding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="600-604")
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--target", default="minilm")
    given = parser.parse_args()
    first, last = map(int, given.rows.split("-"))
    kept: ListCache = {}
    print(
        "| defense | words that fit, in the mean | of | places | remark | processor, s |\n"
        "|---|---|---|---|---|---|"
    )
    for defense in DEFENSES:
        began = time.process_time()
        spec = AuditSpec.from_plain(
            {
                "target": given.target,
                "data": f"cola:split=dev,rows={given.rows}",
                "limit": last - first + 1,
                "attacks": "blind",
                "defenses": defense,
            }
        )
        found = bound_setting(spec, words=given.words, kept=kept)
        (count,) = found.bounds
        print(
            f"| {defense} | {count.mean:.2f} | {count.without_update:.0f} | {count.n} |"
            f" {found.remarks[0]} | {time.process_time() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
