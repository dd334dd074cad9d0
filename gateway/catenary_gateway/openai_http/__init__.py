"""The HTTP paths that OpenAI's, vLLM's, Cohere's and Anthropic's clients call.

paths               the table of all of them
prompt_calls        what all have in common, from the headers to the session or the data plane
completion_request  the body of a completion or chat, as what the session plane takes
completions         these two, whose answers are written by `answers`
bodies              bodies as types, and what is refused of them
event_streams       answers as server-sent events
responses, messages, encoders   the protocols built on these
description         `/openapi.json` and `/docs`

What changes the answer and is not offered is refused by the field. Other unknown fields are
ignored, as clients send many.
"""

from catenary_gateway.openai_http.paths import routes

__all__ = ["routes"]
