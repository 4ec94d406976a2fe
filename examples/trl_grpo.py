"""GRPO with TRL's trainer: foretoken generates the rollouts, and each step replaces its weights.

    pip install trl
    foretoken serve ./policy --allow-weight-updates
    python examples/trl_grpo.py ./policy [URL]    (or FORETOKEN_URL)

TRL's client sends weights from GPU to GPU. `SafetensorsClient` sends them as parts of a file over
HTTP instead, so it needs neither a GPU nor the package vllm. The trainer itself is unchanged. The
policy is loaded with the data type of its files, since an update must not change it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import trl.generation.vllm_client
import trl.generation.vllm_generation
from datasets import Dataset
from safetensors.torch import save
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

URL = os.environ.get("FORETOKEN_URL", "http://127.0.0.1:8000")
PART_BYTES = 2_000_000  # below --max-body-bytes in base64
STEPS, PROMPTS, GROUP, TOKENS = 2, 2, 4, 16


class SafetensorsClient(VLLMClient):
    """TRL's client, with weight updates as parts of one safetensors file."""

    def init_communicator(self, device: object = None) -> None:  # noqa: ARG002 - no GPU is used
        """Check that the server takes weight updates; no group of GPUs is opened."""
        if self.get_server_info()["weight_transfer_config"] is None:
            raise RuntimeError("the server needs --allow-weight-updates")

    def update_named_params(
        self,
        metadata: list[tuple[str, str, list[int]]],  # noqa: ARG002 - the file has names and shapes
        named_params: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Send all tensors, and let the server replace its weights by them."""
        data = save({name: each.detach().cpu().contiguous() for name, each in named_params})
        self._post(f"{self.base_url}/start_weight_update", json={})
        for start in range(0, len(data), PART_BYTES):
            part = base64.b64encode(data[start : start + PART_BYTES]).decode()
            info = {"data": part, "offset": start}
            self._post(f"{self.base_url}/update_weights", json={"update_info": info})
        digest = {"sha256": hashlib.sha256(data).hexdigest()}
        self._post(f"{self.base_url}/finish_weight_update", json=digest)


def use_foretoken() -> None:
    """Let TRL's server mode use `SafetensorsClient`, and not ask for the package vllm."""
    for module in (trl.generation.vllm_client, trl.generation.vllm_generation):
        vars(module)["is_vllm_available"] = lambda *_, **__: True
    vars(trl.generation.vllm_generation)["VLLMClient"] = SafetensorsClient


def reward(completions: list[str], **_: object) -> list[float]:
    """Return the share of vowels in each completion."""
    return [sum(char in "aeiou" for char in each) / (len(each) or 1) for each in completions]


def trainer_for(policy: str, url: str, output_dir: str) -> Any:  # noqa: ANN401 - TRL is not typed
    """Return TRL's trainer of the policy, which a server at ``url`` serves."""
    use_foretoken()
    prompts = ["def area(", "import os\n", "class Stack:", "for i in range("]
    config = GRPOConfig(
        output_dir=output_dir,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        model_init_kwargs={"dtype": "auto"},
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    return GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )


def main(policy: str, url: str = URL) -> None:
    """Train the policy for some steps, and send the server its last weights."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(policy, url, folder)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        for each in trainer.state.log_history:
            if "reward" in each:
                print(f"step {each['step']}: reward {each['reward']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
