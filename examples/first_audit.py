"""A first audit: how much of four made-up messages comes back out of the gradients of a small
model.

python examples/first_audit.py [--target minilm]     (tiny takes seconds, minilm minutes on a CPU)
"""

import argparse

import gradleak

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--target", default="tiny")
parser.add_argument("--steps", type=int, default=200)
chosen = parser.parse_args()

finished = gradleak.measure(
    target=chosen.target, data="canaries", attacks=[f"dlg:steps={chosen.steps}"], limit=4
)
record = finished.record

for private, guess in zip(finished.private, record.attacks["dlg"].examples, strict=True):
    print(f"secret  {private.examples[0].text}\nguess   {guess.guess}\n")

print(f"{'metric':<16}{'dlg':>6}  {'95 % interval':<14}{'blind':>6}")
for name in ("rouge1", "token_accuracy", "bag_f1", "exact_match"):
    score = record.worst_case[name]
    print(f"{name:<16}{score.mean:>6.2f}  [{score.low:.2f}, {score.high:.2f}]  {score.blind:>6.2f}")

print("flags:", ", ".join(flag.name for flag in record.attacks["dlg"].flags))
