"""A Flower app whose clients' messages are captured: python examples/flower_app.py"""

import json

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from gradleak.integrations.flower import CaptureMod
from gradleak.integrations.flower_in_process import InProcessGrid
from gradleak.targets.tiny import Tiny

opened = Tiny(hidden=64, heads=4).open(torch.device("cpu"))  # a small random classifier
model, tokenizer = opened.module.requires_grad_(True), opened.tokenizer
TEXTS = [["the code of the door is four two .", "call me on monday !"],
         ["my house is blue .", "she gave her friend a red book"]]  # fmt: skip
app = ClientApp(mods=[CaptureMod("captures")])  # without gradleak: ClientApp()


@app.train()
def train(message, context):  # one step of plain SGD, then the weights leave
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
    read = tokenizer(TEXTS[context.node_config["partition-id"]], padding=True, return_tensors="pt")
    optimizer.zero_grad()
    model(**read, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": 2})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


model.save_pretrained("model"), tokenizer.save_pretrained("model")
with open("truth.jsonl", "w") as file:  # who trained on what, for scores
    for place, text in enumerate(TEXTS[0] + TEXTS[1]):
        row = {"client": f"partition-{place // 2}", "text": text, "label": place % 2}
        print(json.dumps(row), file=file)
grid, arrays = InProcessGrid(app, clients=2), ArrayRecord(model.state_dict())
FedAvg(fraction_evaluate=0.0).start(grid, arrays, 2, train_config=ConfigRecord({"lr": 0.5}))
