"""What leaks from a loop that accelerate prepared: python examples/own_accelerate.py"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator

import gradleak
from gradleak.integrations.steps import capture_steps
from gradleak.targets.tiny import Tiny

opened = Tiny().open(torch.device("cpu"))  # a small random classifier
tokenizer, model = opened.tokenizer, Tiny().open(torch.device("cpu")).module.requires_grad_(True)
texts, labels = ["the code of the door is four two .", "call me on monday !"], [0, 1]

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
with tempfile.TemporaryDirectory() as folder:
    with capture_steps(model, optimizer, folder, know=["batch_size"]):
        for text, label in zip(texts, labels, strict=True):
            with accelerator.accumulate(model):
                batch = tokenizer([text], return_tensors="pt")
                accelerator.backward(model(**batch, labels=torch.tensor([label])).loss)
                optimizer.step()  # where gradients are synchronised: once
                optimizer.zero_grad()
    found = gradleak.reconstruct(
        Path(folder) / "round-00000.safetensors",
        model=opened.module,  # at the weights of before the step
        tokenizer=tokenizer,
        attacks="span",
    )
score = gradleak.score(found, texts, labels=labels).worst_case["bag_f1"]
print(found, f"\nbag_f1 {score.mean:.2f}, blind {score.blind:.2f}")
