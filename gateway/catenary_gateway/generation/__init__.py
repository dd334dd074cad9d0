"""Text generation as the gateway sees it: text in and out, tokens between.

An endpoint turns a message into a `Prompt` and `SamplingParameters`; `intake` makes them a
`GenerationRequest` with the model's `TextCodec` (chat template, tokenizer, both as the model's
repository has them). `SessionPlane` asks the scheduler for a chain, opens the session on its first
agent and takes the tokens that come back, in order and each once, also when the session is started
again elsewhere: the token history kept here is all it takes. `GenerationStream` is the endpoint's
end: `next` gives the text that is ready. The history is the queue, so a slow reader holds no more
than `max_tokens` tokens. Sessions share admission, request numbers and metrics with the
data plane.
"""
