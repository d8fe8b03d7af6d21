"""The client of nvflare_job.py: one step of plain SGD on its own texts, then the weights leave."""

import nvflare.client as flare
import torch
from transformers import BertForSequenceClassification

from gradleak.targets.tiny import Tiny

opened = Tiny(hidden=64, heads=4).open(torch.device("cpu"))  # a small random classifier
TEXTS = {"site-1": ["the code of the door is four two .", "call me on monday !"],
         "site-2": ["my house is blue .", "she gave her friend a red book"]}  # fmt: skip


class Classifier(BertForSequenceClassification):
    """A model that NVFlare can build on every site."""

    def __init__(self):
        super().__init__(opened.module.config)
        self.load_state_dict(opened.module.state_dict())


def train():
    model = Classifier().eval()
    flare.init()
    while flare.is_running():
        model.load_state_dict(flare.receive().params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        texts = TEXTS[flare.get_site_name()]
        batch = opened.tokenizer(texts, padding=True, return_tensors="pt")
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
        sent = {name: value.clone() for name, value in model.state_dict().items()}
        flare.send(flare.FLModel(params=sent, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    train()
