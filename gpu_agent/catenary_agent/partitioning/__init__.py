"""Front ends of model files: a model as a graph, and ranges of its blocks as smaller models.

    front end (onnx_graph, torch_graph)   a model file -> an abstract `CutGraph`, and back: a range
                                          of blocks -> a smaller model with only its own weights
    graph                                 the abstract graph: which tensors cross which cut
    jailed                                what is asked of the jail about a model
    parts                                 extracted parts on disk, shared by the agents of a machine

Where to cut is decided in `catenary_agent.preparing`. Boundary `i` of a `BlockTable` holds every
tensor computed before block `i` and needed at or behind it. A part therefore may be handed tensors
it neither makes nor uses: its executor passes them on beside the session.
"""
