"""What leaks from a step of DP-SGD with Opacus: python examples/own_opacus.py"""

import tempfile
import warnings
from pathlib import Path

import torch
from opacus import PrivacyEngine

import gradleak
from gradleak.integrations.opacus import capture_private_steps
from gradleak.targets.tiny import Tiny

warnings.simplefilter("ignore")  # Opacus, of its random generator
opened = Tiny().open(torch.device("cpu"))  # a small random classifier
tokenizer, model = opened.tokenizer, Tiny().open(torch.device("cpu")).module.requires_grad_(True)
texts, labels = ["the code of the door is four two .", "call me on monday !"], torch.tensor([0, 1])
ids = tokenizer(texts, padding=True, return_tensors="pt")
data = torch.utils.data.TensorDataset(ids["input_ids"], ids["attention_mask"], labels)
made = PrivacyEngine().make_private(
    module=model.train(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=torch.utils.data.DataLoader(data, 2),
    poisson_sampling=False, noise_multiplier=1.0, max_grad_norm=1.0,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    know = ["batch_size", "lengths", "labels"]
    with capture_private_steps(*made[:2], folder, know=know, sampling_rate=1.0, steps=1):
        for words, mask, classes in made[2]:
            place = torch.arange(words.shape[1]).repeat(len(words), 1)
            batch = {"input_ids": words, "attention_mask": mask, "position_ids": place}
            made[0](**batch, token_type_ids=0 * words, labels=classes).loss.backward()
            made[1].step()
    update = Path(folder) / "round-00000.safetensors"
    given = {"model": opened.module, "tokenizer": tokenizer, "attacks": "dlg:steps=50"}
    found = gradleak.reconstruct(update, **given)
score = gradleak.score(found, texts).worst_case["bag_f1"]
print(found, f"\nbag_f1 {score.mean:.2f}, blind {score.blind:.2f}")
