"""The OpenAI endpoints: models, chat completions and completions, streamed or not.

`completion_request` reads a body into what the session plane takes, and refuses by the table in
`parameters` what it cannot honour; `answers` writes the objects OpenAI's clients parse, with
log probabilities from `logprob_forms`; `streaming` sends them as server-sent events; `routes` puts
them together. Unknown fields are ignored, as clients send many.
"""

from catenary_gateway.openai_http.routes import routes

__all__ = ["routes"]
