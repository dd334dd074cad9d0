"""The gateway: endpoints, and one data plane behind all of them.

An endpoint (`oip`, `openai_http`, and those in `endpoints`) turns a message into an
`InferenceRequest` with a pure converter (`tensors`), asks whether it may go on (`admission`,
`fairness`), calls `DataPlane.infer` and turns the answer back. The data plane keeps the tensors,
asks the scheduler over one stream (`scheduler_link`; `groups`: over several), sends rows to the
first agent of a route and merges the rows that come back until the request is complete (`results`).
`generation` does the same for text. What remains of a request is in `observability`; `scaling` says
what the scheduler advises. Everything a request needs lives in its `PendingRequest`; whatever the
scheduler or an agent does, its own deadline ends it. A gateway holds no state that outlives its
requests: run as many as wanted.
"""
