"""Body fields of other servers: vLLM, SGLang, llama.cpp, Ollama and transformers.

A field that foretoken has under another name is marked `SameAs`, in the body's struct. A field that
would change the answer and is not supported is marked `Refused`, here. Fields that change no answer
(``user``, ``rid``, ``cache_prompt``, ``mirostat_tau`` without ``mirostat``) are not listed: unknown
fields are ignored, since clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from ..types.fields import Refused

Absent = Annotated[Any, Refused()]
Off = Annotated[Any, Refused(False)]
On = Annotated[Any, Refused(True)]
Zero = Annotated[Any, Refused(0)]
One = Annotated[Any, Refused(1)]
Empty = Annotated[Any, Refused("", [], {})]
PENALTIES = {
    "repeat_penalty": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Penalties, with the values at which they have no effect. Here they apply to the whole text."""


class RefusedSampling(Struct, kw_only=True):
    """Sampling methods that foretoken does not have."""

    # fields that truncate the distribution
    typical_p: One = None
    typical: One = None
    tfs_z: One = None
    tfs: One = None
    top_a: Zero = None
    top_n_sigma: Annotated[Any, Refused(-1, 0)] = None
    epsilon_cutoff: Zero = None
    eta_cutoff: Zero = None
    xtc_probability: Zero = None
    min_keep: Annotated[Any, Refused(0, 1)] = None
    # fields that change the temperature while generating
    mirostat: Zero = None
    mirostat_mode: Zero = None
    dynatemp_range: Zero = None
    dynamic_temperature: Off = None
    smoothing_factor: Zero = None
    adaptive_target: Annotated[Any, Refused(-1)] = None
    temperature_last: Off = None
    # fields of penalties
    repeat_last_n: Annotated[Any, Refused(-1, unless=PENALTIES)] = None
    repetition_penalty_range: Zero = None
    encoder_repetition_penalty: One = None
    dry_multiplier: Zero = None
    no_repeat_ngram_size: Zero = None
    penalty_alpha: Zero = None
    guidance_scale: One = None
    # fields of beam search and of multiple candidates
    use_beam_search: Off = None
    num_beams: One = None
    num_beam_groups: One = None
    diversity_penalty: Zero = None
    length_penalty: One = None
    early_stopping: Off = None
    best_of: One = None
    do_sample: On = None
    # fields of sampler order and custom sampling code
    samplers: Empty = None
    sampler_order: Empty = None
    sampler_priority: Empty = None
    logits_processors: Empty = None
    custom_logit_processor: Empty = None
    watermarking: Off = None
    repetition_detection: Empty = None
    n_indent: Zero = None
    t_max_predict_ms: Annotated[Any, Refused(-1, 0)] = None


class RefusedFields(RefusedSampling, kw_only=True):
    """Unsupported fields, other than for sampling, that would change the answer."""

    # fields that change where an answer ends
    stop_regex: Empty = None
    no_stop_trim: Off = None
    include_stop_str_in_output: Off = None
    skip_special_tokens: On = None
    # fields of structured output
    structural_tag: Empty = None
    response_format: Annotated[Any, Refused({"type": "text"})] = None
    guided_whitespace_pattern: Empty = None
    grammar_lazy: Off = None
    grammar_triggers: Empty = None
    # fields of tools and reasoning
    functions: Empty = None
    function_call: Annotated[Any, Refused("none")] = None
    parse_tool_calls: On = None
    enable_thinking: Absent = None
    thinking_token_budget: Annotated[Any, Refused(-1)] = None
    thinking_budget: Annotated[Any, Refused(-1)] = None
    reasoning_budget: Annotated[Any, Refused(-1)] = None
    reasoning_budget_tokens: Annotated[Any, Refused(-1)] = None
    reasoning_format: Annotated[Any, Refused("auto", "deepseek")] = None
    separate_reasoning: On = None
    stream_reasoning: On = None
    include_reasoning: On = None
    # fields that change the prompt
    input_ids: Empty = None
    input_embeds: Empty = None
    prompt_embeds: Empty = None
    sampling_params: Empty = None
    session_params: Empty = None
    truncate_prompt_tokens: Off = None
    add_special_tokens: Off = None
    chat_template: Empty = None
    add_generation_prompt: On = None
    continue_final_message: Off = None
    documents: Empty = None
    generation_prompt: Empty = None
    echo: Off = None
    suffix: Empty = None
    safe_prompt: Off = None
    # other servers' fields for audio, images and video
    audio: Absent = None
    mm_processor_kwargs: Empty = None
    media_io_kwargs: Empty = None
    image_data: Empty = None
    audio_data: Empty = None
    video_data: Empty = None
    # fields of LoRA adapters
    lora_path: Empty = None
    lora: Empty = None
    # fields that ask for additional output
    prompt_logprobs: Off = None
    logprob_token_ids: Empty = None
    n_probs: Zero = None
    post_sampling_probs: Off = None
    return_logprob: Off = None
    return_tokens: Off = None
    return_tokens_as_token_ids: Off = None
    return_prompt_token_ids: Off = None
    return_prompt_text: Off = None
    return_hidden_states: Off = None
    return_routed_experts: Off = None
    return_meta_info: Off = None
    return_cached_tokens_details: Off = None
    return_spec_tokens_details: Off = None
    response_fields: Empty = None
    # fields of KV transfer and other extensions of other engines
    bootstrap_host: Absent = None
    bootstrap_room: Absent = None
    ec_transfer_params: Empty = None
    vllm_xargs: Empty = None
    # fields of hosted services, such as web search
    enable_search: Off = None
    web_search_options: Absent = None
