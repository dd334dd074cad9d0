"""The cost of each block of a model: measured on this host's device, or estimated for another.

    sweep       measures a device: every level, block and batch size, all virtual GPUs busy
    worker      one virtual GPU of a measurement: a process that runs blocks in step with others
    siblings    the worker processes of one level, started, commanded and ended together
    samples     timestamps of runs -> p50 and p95 of those during which every sibling was busy
    progress    what has been measured so far, kept on disk after every step
    profiler    puts it together: model in, `catenary_services.domain.profile.ModelProfile` out

Estimates come from the block table's kernels and `catenary_services.devices.roofline`.

An estimate is marked as one in every output: `estimated` is true and `source` says "roofline".
"""
