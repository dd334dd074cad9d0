"""A pooled-pipeline scenario on real processes: `catenaryd simulate pools SCENARIO.yaml --live`.

The same plan, the same arrivals and the same dispatcher as in the simulator, but with a Redis, a
scheduler, a gateway, one agent process per virtual GPU and a load generator, talking real gRPC and
moving tensors of the real sizes through the real transports. Only the devices are emulated: an
agent computes nothing and takes the time the profile says, its link is as slow as the cluster's.

`dilation` makes every time of a scenario longer by one factor (block times, SLOs, transfers) and
every rate smaller, so that a small machine carries the control path of the whole cluster. Nothing
else changes: utilisation, batch sizes and load factors are those of the undilated cluster.
"""
