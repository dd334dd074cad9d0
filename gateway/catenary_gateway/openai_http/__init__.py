"""The HTTP paths that OpenAI's, vLLM's, Cohere's and Anthropic's clients call.

paths               the table of all of them
calls               what all have in common
completion_request  the body of a completion or chat, as what the session plane takes; it refuses by
                    the table in `parameters` what cannot be honoured
completions         these two: `answers` writes the objects that OpenAI's clients parse, with log
                    probabilities from `logprob_forms`, and `streaming` their chunks
responses           OpenAI's newer form of a chat
anthropic           Anthropic's form of a chat
encoders            embeddings, scores and reranking
models              the list of models, and their tokenizers
description         `/openapi.json` and `/docs`

What changes the answer and is not offered is refused by the field. Other unknown fields are
ignored, as clients send many.
"""

from catenary_gateway.openai_http.paths import routes

__all__ = ["routes"]
