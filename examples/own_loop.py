"""What leaks from a training loop of your own: python examples/own_loop.py"""

import tempfile
from pathlib import Path

import torch

import gradleak
from gradleak.targets.tiny import Tiny

# A small random classifier; yours may come from from_pretrained()
opened = Tiny().open(torch.device("cpu"))
model, tokenizer = opened.module.requires_grad_(True), opened.tokenizer
texts, labels = ["the code of the door is four two .", "call me on monday !"], [0, 1]
update = Path(tempfile.mkdtemp()) / "update.safetensors"

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
told = {"know": ["batch_size"], "defense": "clipping:clip=1.0"}
with gradleak.capture(model, update, tokenizer=tokenizer, **told):
    for text, label in zip(texts, labels, strict=True):  # two batches, accumulated
        batch = tokenizer([text], return_tensors="pt")
        (model(**batch, labels=torch.tensor([label])).loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

# Before optimizer.step(): the attacker knows the weights at which the update was computed
found = gradleak.reconstruct(update, model=model, tokenizer=tokenizer, attacks="span")
for guess in found:
    print(guess.text, "| proven" if guess.certified else "", f"| explains {guess.explains:.0%}")

optimizer.step()
score = gradleak.score(found, texts, labels=labels).worst_case["bag_f1"]
print(f"bag_f1 {score.mean:.2f}, blind {score.blind:.2f}")
update.unlink()  # it holds the texts for whoever has the model
update.parent.rmdir()
