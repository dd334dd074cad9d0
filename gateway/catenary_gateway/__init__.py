"""The gateway: endpoints, and one data plane behind all of them.

An endpoint (`oip`, `openai_http`, and those in `endpoints`) turns a message into an
`InferenceRequest` with a pure converter (`tensors`), has it admitted (`admission`, `fairness`),
calls `DataPlane.infer` and converts the answer back. The data plane keeps the tensors, asks the
scheduler over one stream (`scheduler_link`; over several with `groups`), sends rows to the first
agent of a route and merges the rows that come back until the request is complete (`results`).
`generation` does the same for text. `observability` keeps the records of finished requests, and
`scaling` passes on the scheduler's advice. Everything a request needs lives in its
`PendingRequest`; whatever the scheduler or an agent does, its own deadline ends it. A gateway keeps
no state beyond its requests, so any number of gateways can run.
"""
