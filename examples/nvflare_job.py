"""An NVFlare job whose clients' messages are captured: python examples/nvflare_job.py"""

import json
from pathlib import Path

import nvflare_client
from nvflare.app_opt.pt.recipes import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv

from gradleak.integrations.nvflare import attach

if __name__ == "__main__":  # NVFlare starts a process for each site, which reads this file too
    recipe = FedAvgRecipe(
        name="example",
        model=nvflare_client.Classifier(),
        min_clients=2,
        num_rounds=2,
        train_script=str(Path(nvflare_client.__file__)),
    )
    attach(recipe, "captures", learning_rate=0.5)  # the one line for gradleak
    nvflare_client.Classifier().save_pretrained("model")
    nvflare_client.opened.tokenizer.save_pretrained("model")
    with open("truth.jsonl", "w") as file:  # who trained on what, for scores
        for site, texts in nvflare_client.TEXTS.items():
            for label, text in enumerate(texts):
                file.write(json.dumps({"client": site, "text": text, "label": label}) + "\n")
    recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
