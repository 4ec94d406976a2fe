"""``--device``: which one computes, with which kernels and sizes, and what is said where it cannot.

No GPU is there: torch is made to say that one is.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.api.build.target import device_of
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.ops.backends import choose_ops
from foretoken.core.ops.machine.device import choose_device, default_stream, prepare_thread
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.ops.triton import availability
from foretoken.core.ops.weights import HeadLayout

pytest.importorskip("triton")

from foretoken.core.ops.triton.triton_ops import TritonOps  # under the interpreter, whoever is next

HEADS = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
LAUNCH_PROBLEM = availability.launch_problem
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def heads(head_dim: int = 128, num_heads: int = 32) -> HeadLayout:
    return HeadLayout(num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, scale=0.1)


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    """None of these tests computes on a GPU."""
    return CPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a Hopper."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a Hopper")
    monkeypatch.setattr(availability, "launch_problem", lambda: "")
    monkeypatch.delenv(availability.INTERPRET, raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(availability.INTERPRET, raising=False)


# -- which device -------------------------------------------------------------------------------


def test_auto_is_cuda_where_there_is_one_and_a_log_line_says_so(gpu, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == CUDA
    assert "device auto: cuda, a Hopper" in caplog.text
    assert choose_device("cpu") == CPU


def test_auto_is_the_cpu_where_there_is_no_gpu_and_cuda_is_refused(no_gpu, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == CPU
    assert "device auto: cpu, " in caplog.text
    with pytest.raises(ModelLoadError, match=r"device cuda is not available: (this )?torch"):
        choose_device("cuda")
    with pytest.raises(ModelLoadError, match="device meta is not supported; use cpu or cuda"):
        choose_device("meta")


def test_who_names_the_native_kernels_need_not_name_the_cpu(gpu) -> None:
    assert device_of(EngineConfig(backend="native")) == CPU
    assert device_of(EngineConfig()) == CUDA
    assert device_of(EngineConfig(device="cpu")) == CPU


# -- which kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_on_cuda_the_triton_kernels_compute(gpu, backend: Any, dtype: torch.dtype) -> None:
    found = choose_ops("cuda", backend=backend, dtype=dtype, heads=[HEADS], exact="batch")
    assert isinstance(found, TritonOps)
    assert found.exact == "batch"
    assert isinstance(choose_ops("cuda", backend="torch", heads=[HEADS]), TorchOps)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"heads": [heads(96)]}, "heads of 96 dimensions"),
        ({"heads": [heads(8)]}, "heads of 8 dimensions"),
        ({"heads": [heads(512)]}, "heads of 512 dimensions"),
        ({"heads": [heads(num_heads=128)]}, "128 query heads per KV head"),
        ({"heads": [HEADS], "dtype": torch.float64}, "float64"),
        ({"heads": [HEADS, heads(64)]}, "no Triton kernels for heads of several shapes"),
        (
            {"heads": [replace(HEADS, value_eps=1e-6)]},
            "no Triton kernel normalises the values of attention",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_model_that_does_not_suit_them_is_computed_by_torch_unless_they_are_named(
    gpu, caplog, options: dict[str, Any], why: str
) -> None:
    assert isinstance(choose_ops("cuda", backend="auto", **options), TorchOps)
    assert f"using the slower PyTorch backend: {why}" in caplog.text.replace(
        "torch.float64", "float64"
    )
    with pytest.raises(ModelLoadError, match=f"backend triton is not available: .*{why}"):
        choose_ops("cuda", backend="triton", **options)
    with pytest.raises(ModelLoadError, match=f"quantize int8 needs .*{why}"):
        choose_ops("cuda", backend="auto", quantize="int8", **options)


def test_a_gpu_without_the_instructions_is_left_to_torch(gpu, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    assert isinstance(choose_ops("cuda", backend="auto", heads=[HEADS]), TorchOps)
    assert "compute capability 7.5 is below 8.0" in caplog.text


def test_without_triton_torch_computes_on_cuda_and_a_log_line_says_how_to_get_it(
    gpu, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    assert isinstance(choose_ops("cuda", backend="auto", heads=[HEADS]), TorchOps)
    assert "pip install triton" in caplog.text
    with pytest.raises(ModelLoadError, match="pip install triton"):
        choose_ops("cuda", backend="triton", heads=[HEADS])


def test_where_triton_cannot_launch_torch_computes_and_a_log_line_says_why(
    gpu, monkeypatch, caplog
) -> None:
    class Broken:
        @property
        def active(self) -> object:
            raise RuntimeError("no C compiler\nand more of it")

    monkeypatch.setattr("triton.runtime.driver", Broken())
    monkeypatch.setattr(availability, "launch_problem", LAUNCH_PROBLEM)
    assert isinstance(choose_ops("cuda", backend="auto", heads=[HEADS]), TorchOps)
    assert caplog.messages == [
        "using the slower PyTorch backend: Triton cannot use the GPU: no C compiler"
    ]


def test_int8_weights_are_tritons_on_cuda_and_int4_are_nobodys(gpu) -> None:
    found = choose_ops("cuda", backend="auto", heads=[HEADS], quantize="int8")
    assert isinstance(found, TritonOps)
    assert found.quantize == "int8"
    for backend, why in (
        ("auto", "use device cpu"),
        ("triton", "use device cpu"),
        ("torch", "int4"),
    ):
        with pytest.raises(ModelLoadError, match=why):
            choose_ops("cuda", backend=backend, heads=[HEADS], quantize="int4")  # type: ignore[arg-type]


def test_native_kernels_are_refused_on_cuda(gpu) -> None:
    with pytest.raises(ModelLoadError, match=r"backend native is not available: .*device cuda"):
        choose_ops("cuda", backend="native", heads=[HEADS])


def test_on_a_cpu_triton_is_for_tests_alone(no_gpu, monkeypatch) -> None:
    with pytest.raises(ModelLoadError, match="set TRITON_INTERPRET=1"):
        choose_ops("cpu", backend="triton", heads=[HEADS])
    monkeypatch.setenv(availability.INTERPRET, "1")
    assert isinstance(choose_ops("cpu", backend="triton", heads=[HEADS]), TritonOps)
    assert isinstance(choose_ops("cpu", backend="auto", heads=[HEADS]), NativeOps | TorchOps)
    with pytest.raises(ModelLoadError, match="bfloat16 wrongly"):
        choose_ops("cpu", backend="triton", heads=[HEADS], dtype=torch.bfloat16)


def test_the_interpreter_is_never_run_on_a_gpu(gpu, monkeypatch, caplog) -> None:
    monkeypatch.setenv(availability.INTERPRET, "1")
    assert isinstance(choose_ops("cuda", backend="auto", heads=[HEADS]), TorchOps)
    assert "TRITON_INTERPRET=1 selects" in caplog.text


UNTOUCHED = """
import sys
sys.modules["triton"] = None  # importing it raises
from foretoken import LLM, SamplingParams
options = dict(device="cpu", threads=1, kv_tokens=512, max_model_len=256, speculation="off")
with LLM("builtin", **options) as llm:
    llm.generate([5, 6, 7], SamplingParams(max_tokens=4))
assert not [name for name in sys.modules if name.startswith("triton.")]
"""


def test_a_server_on_the_cpu_never_imports_triton() -> None:
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True, timeout=120)


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"device": "cuda", "backend": "native"}, "backend"),
        ({"device": "cuda", "quantize": "int4"}, "quantize"),
        ({"backend": "triton", "quantize": "int4"}, "quantize"),
        ({"backend": "torch", "quantize": "int8"}, "quantize"),
    ],
)
def test_options_that_exclude_each_other_are_refused_by_name(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{param} ") as caught:
        EngineConfig(**options)
    assert caught.value.param == param


def test_what_is_not_asked_for_is_chosen_for_the_device() -> None:
    asked = EngineConfig(page_size=8)
    assert asked.sizes("cpu").page_size == asked.sizes("cuda").page_size == 8
    host, gpu = EngineConfig().sizes("cpu"), EngineConfig().sizes("cuda")
    assert (host.page_size, host.max_batch_tokens, host.max_running) == (16, 256, 64)
    assert (gpu.page_size, gpu.max_batch_tokens, gpu.max_running) == (32, 2048, 256)


def test_work_goes_to_the_default_stream_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with default_stream(CUDA) as stream:
        assert stream == ("default", CUDA)
    with default_stream(CPU) as stream:
        assert stream is None


def test_a_thread_gets_its_handle_of_cublas_for_the_default_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, used = [], []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "stream", lambda each: used.append(each) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: made.append([*used]))
    prepare_thread(CPU)
    assert not made
    prepare_thread(CUDA)
    assert made == [[("default", CUDA)]]
