"""The calls of TRL's client in server mode, and two steps of its trainer; prints what was seen.

python run_trl.py URL POLICY EXAMPLES
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

warnings.simplefilter("ignore")
url, policy, examples = sys.argv[1:]
sys.path.insert(0, examples)

import torch  # noqa: E402
from trl.generation import vllm_client  # noqa: E402
from trl_grpo import trainer_for, use_foretoken  # noqa: E402

PROMPT = [40, 41, 42, 43]


def client_calls() -> dict[str, Any]:
    """What TRL's own client gets, which is not a subclass here."""
    use_foretoken()
    vars(vllm_client)["get_ip"] = lambda: "127.0.0.1"
    client = vllm_client.VLLMClient(base_url=url)
    generated = client.generate([PROMPT, PROMPT[:2]], n=3, max_tokens=5, logprobs=2)
    scored = client.get_sequence_logprobs([PROMPT], [2], top_logprobs=3)
    refusals = {}
    for name, call in {
        "init": lambda: client._post(
            f"{url}/init_weight_transfer_engine", json={"init_info": {"world_size": 2}}
        ),
        "update": lambda: client._post(
            f"{url}/update_weights", json={"update_info": {"names": ["a"], "shapes": [[1]]}}
        ),
        "cuda": lambda: client.init_communicator(device="cpu"),
    }.items():
        try:
            call()
        except Exception as error:
            refusals[name] = str(error)
    client.reset_prefix_cache()
    client.close_communicator()
    world_size = client.get_world_size()
    return {"generated": generated, "scored": scored, "refusals": refusals, "world": world_size}


def train() -> dict[str, Any]:
    """What two steps changed; the log-probabilities are the trained model's for fixed tokens."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(policy, url, folder)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        ids = torch.tensor([PROMPT])
        with torch.no_grad():
            rows = trainer.model(input_ids=ids).logits.float().log_softmax(-1)[0]
        logprobs = [float(rows[i, each]) for i, each in enumerate(PROMPT[1:])]
        return {"steps": trainer.state.global_step, "logprobs": logprobs}


print(json.dumps({**client_calls(), **train()}))
