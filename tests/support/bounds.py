"""Values that each sampling parameter refuses: the one table of the type, the SDK and HTTP."""

from __future__ import annotations

NAN, INF = float("nan"), float("inf")
HUGE = 10**400

BAD: dict[str, list[object]] = {
    "n": [0, -1, 65, 10**9, 1.5, "2", None, True],
    "temperature": [-1, -0.1, None, True, NAN, INF, HUGE, "hot"],
    "top_p": [2, 0, -0.1, 1.1, None, NAN, "x"],
    "top_k": [-7, -2, 0.5, 1.5, None, True, "x"],
    "min_p": [1.5, -0.1, 1.1, None, NAN],
    "max_tokens": [-5, 0, 1.5, True, HUGE, "many"],
    "min_tokens": [-1, 0.5, None],
    "stop": [[""], "", [3], 3, None, ["a"] * (2**16 + 1), "é" * (2**15 + 1)],
    "stop_token_ids": [[-1], ["a"], "12", 5, None, [None], [1] * 1025, [HUGE]],
    "ignore_eos": ["perhaps", 2, None],
    "seed": [1.5, "x", True, HUGE],
    "logprobs": [-1, 21, 10**6, 1.5, "1"],
    "prompt_logprobs": [-1, 21, 10**6],
    "prompt_only": [1],
    "presence_penalty": [5, 2.1, -3, None, NAN, INF, "x"],
    "frequency_penalty": [-5, -2.1, 3, None, NAN, "x"],
    "repetition_penalty": [0, -1, None, NAN],
    "logit_bias": [
        [1], {None: 1.0}, {"1": 1.0}, {-1: 1.0}, {1: None}, {1: NAN}, {1: HUGE}, {1: 101},
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], [-1], [None], ["a"], 3],
    "bad_words": [[""], [3], [b"x"], "word", None, ["x"] * 1025],
    "prediction": [3, [-1], ["a"], [2.5]],
    "speculation": [-2, 65, 1.0, True, "on"],
    "cache_salt": [7, "", "x" * 1025],
    "priority": ["high", 1.5, None, HUGE],
    "deadline": [-1, NAN, INF, HUGE, "soon"],
    "kv_budget": [0, -1, 1.5, True, "x"],
    "lora": [5, b"x"],
    "close_early": [2, None, "x"],
    "json_schema": [[], "", "x" * (2**18 + 1)],
    "regex": ["", 5, "x" * (2**18 + 1)],
    "grammar": ["", b"x"],
    "choice": ["ab", [], [""], [5], ["a"] * 4097, ["x" * 2**17, "y" * (2**17 + 1)]],
}  # fmt: skip
"""Refused by `SamplingParams`. JSON can say the first value of each."""

BAD_FOR_THE_ENGINE: dict[str, object] = {
    "stop_token_ids": [10**9],
    "logit_bias": {10**9: 1.0},
    "allowed_token_ids": [10**9],
    "prediction": [10**9],
    "priority": 11,
    "json_schema": {"type": "x"},
    "regex": "a(",
    "grammar": "x",
}
"""Refused at admission, which knows the vocabulary and the options."""

OVER_HTTP = BAD.keys() - {
    *("logprobs", "prompt_logprobs", "prompt_only", "allowed_token_ids", "bad_words"),
    *("lora", "prediction", "deadline", "json_schema", "regex", "grammar", "choice"),
}
"""Parameters that are fields of a request, with the same name and the same values."""
