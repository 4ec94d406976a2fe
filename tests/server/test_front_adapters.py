"""Adapters of a front and its replicas as processes: names, loading, a replica that comes later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.lora_models import AdaptedModel
from support.plain_http import Answer, get, opened
from support.server_process import Server, free_port, front_at, start_replica

PROMPT = "which animals sleep in winter?"
ENGINE = ("--threads", "1", "--kv-tokens", "4096", "--draft", "radix")
ADMIN, KEY = {"authorization": "Bearer admin"}, {"authorization": "Bearer key"}
NUM_NEW = 8


class Front:
    """A front that serves adapters of a tiny model, to a client."""

    def __init__(self, server: Server, adapted: AdaptedModel) -> None:
        self.url, self.adapted = server.url, adapted

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] = KEY) -> Answer:
        with opened(self.url, "POST", path, body, headers) as response:
            return Answer(response)

    def load(self, name: str, path: str) -> Answer:
        body = {"lora_name": name, "lora_path": path}
        return self.post("/v1/load_lora_adapter", body, ADMIN)

    def complete(self, model: str) -> Answer:
        body = {"model": model, "prompt": PROMPT, "return_token_ids": True, "temperature": 0,
                "max_tokens": NUM_NEW, "ignore_eos": True}  # fmt: skip
        return self.post("/v1/completions", body)

    def check(self, *models: str) -> None:
        """Each answers with the tokens of its merged weights, as often as there are replicas."""
        ids = self.adapted.tokenizer(PROMPT).input_ids
        for model in models * 2:
            answer = self.complete(model)
            assert answer.status == 200, answer.content
            wanted = self.adapted.answer(None if model == "base" else model, ids, NUM_NEW)
            assert answer.json["choices"][0]["token_ids"] == wanted, model
            assert answer.json["model"] == model

    @property
    def replicas(self) -> list[dict[str, Any]]:
        return list(get(self.url, "/replicas", ADMIN).json["replicas"])


def until(holds: Callable[[], bool]) -> None:
    """Ask again until something holds: each time a front answers."""
    for _ in range(10_000):
        if holds():
            return
    raise AssertionError("it did not come to hold")


def test_adapters_of_a_front_are_those_of_its_replicas(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    adapted = AdaptedModel(tmp_path)
    address, model = f"tcp://127.0.0.1:{free_port()}", str(adapted.base)
    flags = ("--lora", f"sql={adapted.path('sql')}", "--lora-dir", str(tmp_path),
             "--api-key", "key", "--admin-key", "admin", "--served-model-name", "base",
             "--route", "even")  # fmt: skip
    processes = [start_replica(address, ENGINE, model=model) for _ in range(2)]
    try:
        with front_at(address, flags, num_replicas=2, model=model) as server:
            front = Front(server, adapted)
            until(lambda: len(front.replicas) == 2)
            front.check("sql", "base")
            assert front.load("legal", "legal").json["rank"] == 8
            refused = front.load("none", "base")
            assert (refused.status, refused.error["param"]) == (400, "lora_path")
            front.check("legal", "sql", "base")
            listed = get(server.url, "/v1/models", KEY).json["data"]
            parents = {each["id"]: each["parent"] for each in listed}
            assert parents == {"base": None, "sql": "base", "legal": "base"}

            processes.append(start_replica(address, ENGINE, model=model))
            until(lambda: len(front.replicas) == 3)
            for process in processes[:2]:
                process.kill()
            until(lambda: len(front.replicas) == 1)
            until(lambda: front.complete("legal").status == 200)  # it may load them still
            front.check("legal", "sql", "base")

            body = {"lora_name": "sql"}
            assert front.post("/v1/unload_lora_adapter", body, ADMIN).status == 200
            assert front.complete("sql").status == 404
            front.check("legal", "base")
            assert b"foretoken:lora_loaded 1.0" in get(server.url, "/metrics", ADMIN).content
    finally:
        for process in processes:
            process.kill()
            process.wait()
