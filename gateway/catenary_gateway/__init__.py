"""The gateway: doors, and one data plane behind all of them.

A door (`oip_grpc`, `oip_http`) turns a message into an `InferenceRequest` with a pure converter,
calls `DataPlane.infer` and turns the answer back. The data plane keeps the tensors, asks the
scheduler over one stream (`scheduler_link`), sends rows to the first agent of a route
(`delivery`), and merges the rows that come back (`results`) until the request is complete.
Everything a request needs lives in its `PendingRequest`; whatever the scheduler or an agent does,
its own deadline ends it. A gateway holds no state that outlives its requests: run as many as
wanted.
"""
