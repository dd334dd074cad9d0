"""The OpenAI endpoints: models, chat completions and completions, streamed or not.

`wanted` reads a body into what the generation plane takes, and refuses what cannot be honoured;
`answers` writes the objects OpenAI's clients parse; `stream` writes server-sent events; `routes`
puts them together. Unknown fields are ignored, as clients of many servers send many.
"""

from catenary_gateway.openai_http.routes import routes

__all__ = ["routes"]
