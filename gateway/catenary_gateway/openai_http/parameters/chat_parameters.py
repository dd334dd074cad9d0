"""The parameters of chats and completions, of which the other paths of texts have some."""

from __future__ import annotations

from catenary_gateway.openai_http.parameters.parameter import (
    BOTH,
    CHATS,
    COMPLETIONS,
    Parameter,
    ignored,
    only,
    refused,
    taken,
)

CHAT_PARAMETERS: tuple[Parameter, ...] = (
    *taken(
        BOTH,
        model="`name`, `name:version`, or `name:adapter` where [vLLM serves it]"
        "(executors.md#lora-adapters)",
    ),
    *taken(
        CHATS,
        messages="contents are texts, or parts of type `text`",
        tools="up to 128 functions, of which the model's template tells it; `strict` ones are "
        "held to their schema",
        tool_choice="`none`, `auto`, `required`, a function, or `allowed_tools`",
        parallel_tool_calls="false: one call at most",
        include_reasoning="vLLM's: false leaves out `reasoning_content`",
    ),
    *taken(COMPLETIONS, prompt="a text, token ids, or a list of these, each answered by itself"),
    *taken(
        BOTH,
        max_tokens="without it a chat has all of the context, a completion 16 tokens",
    ),
    *taken(CHATS, max_completion_tokens="the newer name of `max_tokens`"),
    *taken(
        BOTH,
        temperature="0 to 2, by default 1; 0 is greedy",
        top_p="above 0, to 1",
        n="answers to each prompt; at most 128 of all prompts together. Seeds count up from `seed`",
    ),
    *taken(
        COMPLETIONS,
        best_of="so many are generated, and the `n` with the largest sum of log probabilities are "
        "answered; not in streams",
    ),
    *taken(BOTH, seed="any 64-bit integer"),
    *taken(BOTH, stop="a text, or up to 16"),
    *taken(
        BOTH,
        presence_penalty="-2 to 2",
        frequency_penalty="-2 to 2",
        logit_bias="up to 1024 tokens, -100 to 100",
    ),
    *taken(
        CHATS,
        logprobs="true: log probabilities of the answer's tokens",
        top_logprobs="those of the likeliest tokens at each place as well, up to 20",
    ),
    *taken(
        COMPLETIONS,
        logprobs="0 to 5: the same, in the form completions have",
        echo="the text begins with the prompt; with `logprobs` it has those of the prompt, too",
    ),
    *taken(BOTH, stream="true: server-sent events"),
    *taken(BOTH, stream_options="`include_usage`, and of vLLM's `continuous_usage_stats`"),
    *taken(
        BOTH,
        prompt_logprobs="vLLM's: 0 to 20, log probabilities of the prompt's tokens; not in streams",
        top_k="vLLM's",
        min_p="vLLM's: 0 to 1",
        repetition_penalty="vLLM's: 0.01 to 100",
        min_tokens="vLLM's",
        ignore_eos="vLLM's",
        stop_token_ids="vLLM's: up to 1024 tokens",
        include_stop_str_in_output="vLLM's",
        skip_special_tokens="vLLM's",
        bad_words="vLLM's: up to 128 texts that are not generated",
        allowed_token_ids="vLLM's: the only tokens that are generated, up to 1024",
        priority="vLLM's: lowest first; inside and everywhere else higher is more urgent, and "
        "`max_priority` of the key is its negative here",
    ),
    *taken(
        BOTH,
        response_format="`text`, `json_object` or `json_schema`: [the form of the answer]"
        "(#structured-answers)",
        structured_outputs="vLLM's: the same, or a regular expression, a choice or a grammar",
        guided_json="vLLM's: the same, under its earlier names",
        guided_regex="vLLM's: the same, under its earlier names",
        guided_choice="vLLM's: the same, under its earlier names",
        guided_grammar="vLLM's: the same, under its earlier names",
        guided_whitespace_pattern="vLLM's: whitespace between the parts of JSON",
    ),
    *taken(CHATS, chat_template_kwargs="vLLM's: up to 32 variables of the model's template"),
    *refused(COMPLETIONS, "suffix", "is not offered: text is added at the end only"),
    *refused(CHATS, "functions", "is OpenAI's older form of tools: send these"),
    *refused(
        CHATS,
        "function_call",
        "is OpenAI's older form: send tools and tool_choice",
        only("none", "auto"),
    ),
    *refused(CHATS, "modalities", "only text is answered", only([], ["text"])),
    *refused(CHATS, "audio, web_search_options", "is not offered"),
    *refused(BOTH, "use_beam_search", "beam search is not offered"),
    *refused(BOTH, "logits_processors", "code of clients is not run"),
    *refused(BOTH, "truncate_prompt_tokens", "prompts are never cut"),
    *refused(COMPLETIONS, "prompt_embeds", "a prompt is a text or token ids"),
    *refused(CHATS, "chat_template", "chats go through the model's own template"),
    *refused(CHATS, "documents", "is not offered: put them into a message"),
    *refused(CHATS, "continue_final_message", "an answer is always a new message"),
    *refused(CHATS, "add_generation_prompt", "an answer is always a new message", only(True)),
    *refused(CHATS, "echo", "is for completions"),
    *refused(CHATS, "add_special_tokens", "the model's template has them", only(False)),
    *refused(COMPLETIONS, "add_special_tokens", "send token ids to have none", only(True)),
    *refused(BOTH, "return_tokens_as_token_ids", "tokens are named by their texts and bytes"),
    *refused(BOTH, "return_token_ids", "is not offered: ask over gRPC"),
    *ignored(
        BOTH,
        "user, safety_identifier, metadata, store, service_tier, request_id",
        "nothing is done with it",
    ),
    *ignored(BOTH, "prompt_cache_key, prompt_cache_retention, cache_salt", "kept by content alone"),
    *ignored(CHATS, "prediction", "it would make an answer faster, not another"),
    *ignored(CHATS, "reasoning_effort, verbosity", "say it in `chat_template_kwargs`"),
    *ignored(BOTH, "length_penalty, early_stopping", "are for beam search"),
    *ignored(BOTH, "spaces_between_special_tokens", "there are none"),
)
