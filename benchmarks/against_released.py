"""Ours against the released code's own answers: python benchmarks/against_released.py RECORD.json
ANSWERS.jsonl.

Every line of ANSWERS has the place of a sentence (`i`), the released code's guess (`pred`) and the
sentence itself (`ref`), with special tokens. Prints legacy ROUGE of both and the paired difference
with its 95 % interval.
"""

import argparse
import json
from pathlib import Path

from gradleak.metrics.texts import f_measure
from gradleak.records.statistics import interval, paired_difference
from gradleak.records.store import read_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("answers", type=Path)
    chosen = parser.parse_args()
    answers = {
        one["i"]: one
        for one in map(json.loads, chosen.answers.read_text(encoding="utf-8").splitlines())
    }
    for key, attack in read_record(chosen.record).attacks.items():
        ours = {example.batch: example for example in attack.examples}
        places = sorted(set(answers) & set(ours))
        print(f"{key} {attack.spec}: {len(places)} sentences")
        for measure in ("rouge1", "rouge2", "rougeL"):
            mine = [ours[place].values[f"{measure}_legacy"] or 0.0 for place in places]
            theirs = [
                f_measure(measure, answers[place]["ref"][0], answers[place]["pred"][0], legacy=True)
                for place in places
            ]
            gain = paired_difference(mine, theirs)
            print(
                f"  {measure}_legacy: ours {100 * interval(mine).mean:.1f}, released"
                f" {100 * interval(theirs).mean:.1f}, difference {100 * gain.mean:+.1f}"
                f" [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
            )


if __name__ == "__main__":
    main()
