"""What leaks from the steps of Hugging Face's Trainer: python examples/own_trainer.py"""

import copy
import tempfile
from pathlib import Path

import torch
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

import gradleak
from gradleak.integrations.trainer import CaptureCallback
from gradleak.targets.tiny import Tiny

opened = Tiny().open(torch.device("cpu"))  # a small random classifier
tokenizer, config = opened.tokenizer, copy.deepcopy(opened.module.config)
config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
model = type(opened.module)(config)
model.load_state_dict(opened.module.state_dict())
texts, labels = ["the code of the door is four two .", "call me on monday !"], [0, 1]
rows = [{**tokenizer(text), "labels": label} for text, label in zip(texts, labels, strict=True)]

with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    hook = CaptureCallback(Path(folder) / "captures", every=2, know=["batch_size"])
    data = DataCollatorWithPadding(tokenizer)
    Trainer(model, options, train_dataset=rows, data_collator=data, callbacks=[hook]).train()
    # Round 0 was computed at the weights before training; round 100 at those of checkpoint-100
    found = gradleak.reconstruct(
        Path(folder) / "captures" / "round-00000.safetensors",
        model=opened.module, tokenizer=tokenizer, attacks="span",
    )  # fmt: skip
score = gradleak.score(found, texts, labels=labels).worst_case["bag_f1"]
print(found, f"\nbag_f1 {score.mean:.2f}, blind {score.blind:.2f}")
