"""Mistakes in the sampling that a model recommends: where it is read, where it is applied."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "model-goes-before-the-request",
        "SamplingDefaults.fill",
        "            if isinstance(getattr(params, name), LeftOut)\n",
        "",
        ("test_a_value_that_was_given_stays_also_where_it_is_the_default",),
        "a value of the request goes before the model's",
    ),
    Mutation(
        "defaults-are-not-told-from-given-values",
        "SamplingParams",
        "        _OFF,\n",
        "        0,\n",
        ("test_a_model_fills_what_was_left_out",),
        "a field that is left out gets the model's value",
    ),
    Mutation(
        "requests-do-without-the-models-values",
        "EngineClient._register",
        "        params = self.built.sampling_defaults.fill(params)\n",
        "",
        ("test_a_request_that_gives_nothing_gets_the_models_values",),
        "every way in gives requests the model's sampling",
    ),
    Mutation(
        "model-goes-before-the-override",
        "sampling_defaults",
        "replace(own, **parse_overrides(config.override_generation_config))",
        "SamplingDefaults(**parse_overrides(config.override_generation_config) | own.given)",
        ("test_overrides_go_before_the_model_and_hold_without_it",),
        "what the operator sets goes before the model's values",
    ),
    Mutation(
        "model-is-read-though-it-is-not-wanted",
        "sampling_defaults",
        'NO_DEFAULTS if config.generation_config == "none" else model_sampling(source)',
        "model_sampling(source)",
        ("test_a_bad_value_names_file_field_and_the_flag",),
        "--generation-config none ignores the model's values",
    ),
    Mutation(
        "float32-is-shown-with-all-its-digits",
        "_as_written",
        'float(f"{value:.6g}")',
        "value",
        ("test_a_gguf_file_has_them_under_llama_cpps_names",),
        "a value is the one that the author of the file wrote",
    ),
    Mutation(
        "responses-name-what-was-asked",
        "ResponsesRoute.open",
        "self.service.llm.built.sampling_defaults.fill(ask.params)",
        "ask.params",
        ("test_a_response_names_the_values_in_force",),
        "a response names the settings in force",
    ),
    Mutation(
        "server-info-names-folders",
        "_without_paths",
        'each.rpartition("/")[2]',
        "each",
        ("test_server_info_needs_a_key_and_names_neither_keys_nor_folders",),
        "callers do not see folders of the server's machine",
    ),
)
