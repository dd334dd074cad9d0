"""Parameters that the other paths refuse and ignore; they take the fields of their bodies."""

from __future__ import annotations

from catenary_gateway.openai_http.parameters.parameter import (
    EMBEDDINGS,
    ENCODERS,
    MESSAGES,
    RERANKING,
    RESPONSES,
    SCORES,
    TOKENS,
    Parameter,
    ignored,
    only,
    refused,
    unless,
)

_TEXTS = RESPONSES | MESSAGES

PATH_PARAMETERS: tuple[Parameter, ...] = (
    *refused(RESPONSES, "background", "is not offered: a response is made while its client waits"),
    *refused(RESPONSES, "conversation", "is not offered: continue by previous_response_id"),
    *refused(RESPONSES, "previous_input_messages", "is not offered: send them as input"),
    *refused(RESPONSES, "include", "is not offered: a response has nothing more to include"),
    *refused(RESPONSES, "max_tool_calls", "is not offered: calls of tools are the client's"),
    *refused(RESPONSES, "moderation", "is not offered"),
    *refused(RESPONSES, "prompt", "is not offered: templates of prompts are not kept here"),
    *refused(RESPONSES, "reasoning", "is not offered: say it in chat_template_kwargs"),
    *refused(
        RESPONSES,
        "truncation",
        "is not offered: nothing of a conversation is left out",
        unless("disabled"),
    ),
    *refused(RESPONSES, "max_tokens, max_completion_tokens", "is max_output_tokens here"),
    *refused(RESPONSES, "response_format", "is text.format here"),
    *refused(MESSAGES, "container", "is not offered"),
    *refused(MESSAGES, "mcp_servers", "is not offered: tools are the client's"),
    *refused(MESSAGES, "output_format, response_format", "is output_config.format here"),
    *refused(MESSAGES, "thinking", "is not offered", unless({"type": "disabled"})),
    *refused(MESSAGES, "max_completion_tokens", "is max_tokens here"),
    *refused(MESSAGES, "stop", "is stop_sequences here"),
    *refused(
        MESSAGES,
        "seed, min_p, logit_bias, min_tokens, ignore_eos, chat_template_kwargs",
        "is for chats and responses",
    ),
    *refused(
        MESSAGES,
        "presence_penalty, frequency_penalty",
        "is for chats and responses",
        unless(0, 0.0),
    ),
    *refused(MESSAGES, "repetition_penalty", "is for chats and responses", unless(1, 1.0)),
    *refused(_TEXTS, "context_management", "is not offered: nothing of a conversation is left out"),
    *refused(
        _TEXTS,
        "structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar",
        "is for chats and completions",
    ),
    *refused(_TEXTS, "n", "is for chats and completions", unless(1)),
    *refused(_TEXTS, "logprobs, top_logprobs", "is for chats and completions", unless(0)),
    *refused(
        _TEXTS,
        "stop_token_ids, bad_words, allowed_token_ids, include_stop_str_in_output",
        "is for chats and completions",
    ),
    *refused(_TEXTS, "skip_special_tokens", "is for chats and completions", only(True)),
    *refused(
        ENCODERS,
        "truncate_prompt_tokens",
        "is not offered: texts are cut at what the model takes",
        unless(-1),
    ),
    *refused(ENCODERS, "mm_processor_kwargs", "is not offered: only text is read"),
    *refused(EMBEDDINGS, "messages", "is not offered: send texts as input"),
    *refused(EMBEDDINGS, "add_special_tokens", "send token ids to have none", only(True)),
    *refused(
        EMBEDDINGS,
        "normalize, normalized, use_activation",
        "embeddings are as the model makes them",
        only(True),
    ),
    *refused(
        EMBEDDINGS,
        "embed_dtype, embedding_type, output_dtype",
        "numbers are 32-bit floats",
        unless("auto", "float32", "float"),
    ),
    *refused(EMBEDDINGS, "endianness", "is little", unless("native", "little")),
    *refused(EMBEDDINGS, "late_chunking", "is not offered: each text is embedded by itself"),
    *refused(SCORES | RERANKING, "activation", "is use_activation here", only(True)),
    *refused(
        RERANKING,
        "max_tokens_per_doc, max_chunks_per_doc",
        "is not offered: documents are cut at what the model takes",
    ),
    *refused(RERANKING, "rank_fields", "is not offered: documents have a text and nothing else"),
    *refused(TOKENS, "chat_template", "is not offered: the model's own template is used"),
    *refused(TOKENS, "continue_final_message", "is not offered"),
    *refused(TOKENS, "mm_processor_kwargs", "is not offered: only text is read"),
    *refused(TOKENS, "tools", "is not offered: /v1/messages/count_tokens counts tokens of tools"),
    *ignored(
        RESPONSES,
        "prompt_cache_key, prompt_cache_retention, safety_identifier, service_tier, "
        "stream_options, request_id",
        "nothing is done with it",
    ),
    *ignored(MESSAGES, "service_tier, inference_geo, cache_control", "nothing is done with it"),
    *ignored(EMBEDDINGS, "input_type, task", "texts are embedded as they are"),
    *ignored(ENCODERS, "request_id, cache_salt", "nothing is done with it"),
)
