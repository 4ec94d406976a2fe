"""lm-eval with a seed for each request: its answers do not depend on concurrency or drafts.

    pip install 'lm-eval[api]'
    foretoken serve --exact batch
    foretoken serve --exact batch --draft none --port 8001
    python examples/lm_eval_seeds.py http://127.0.0.1:8000 http://127.0.0.1:8001

`--model_args seed=7` of lm-eval is one seed for all requests. `Seeded` is the part to copy: it
derives a seed for each request from that seed and the messages. Each server answers with 1 and with
8 requests at a time, and every run is compared with the first.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import zlib
from typing import Any

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalChatCompletion

WORDS = ("amber", "basket", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
         "jacket", "kettle", "lemon")  # fmt: skip


@register_model("seeded-chat-completions")
class Seeded(LocalChatCompletion):
    """Chat completions with a seed of their own. Equal messages get equal seeds."""

    def _create_payload(self, messages: list[Any], **options: Any) -> dict[str, Any]:  # noqa: ANN401
        payload: dict[str, Any] = super()._create_payload(messages, **options)
        name = f"{payload['seed']}/{json.dumps(payload['messages'])}"
        return {**payload, "seed": zlib.crc32(name.encode()) >> 1}


def answers(url: str, concurrent: int) -> list[str]:
    """Return the answers of a server, in the order of the questions."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        name = json.load(response)["data"][0]["id"]
    questions = Dataset.from_list([{"question": f"Describe the word {word}."} for word in WORDS])
    task = ConfigurableTask(config={
        "task": "describe", "custom_dataset": lambda **_: {"test": questions},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "question",
        "doc_to_target": "question",
        "generation_kwargs": {"temperature": 1.0, "do_sample": True, "max_gen_toks": 24,
                              "until": ["\n\n"]},
    })  # fmt: skip
    found = simple_evaluate(
        model=Seeded(base_url=f"{url}/v1/chat/completions", model=name, seed=7,
                     num_concurrent=concurrent),
        tasks=[task], apply_chat_template=True, log_samples=True,
    )  # fmt: skip
    samples = sorted(found["samples"]["describe"], key=lambda each: each["doc_id"])
    return [each["resps"][0][0] for each in samples]


def main(urls: list[str]) -> None:
    """Compare the runs."""
    first = answers(urls[0], 1)
    for url, concurrent in [(url, num) for url in urls for num in (1, 8)]:
        again = answers(url, concurrent)
        differing = sum(one != other for one, other in zip(first, again, strict=True))
        print(f"{url}, {concurrent} at a time: {differing} of {len(first)} answers differ")


if __name__ == "__main__":
    main(sys.argv[1:] or ["http://127.0.0.1:8000"])
