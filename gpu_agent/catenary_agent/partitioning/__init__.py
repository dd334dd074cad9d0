"""Front ends of model files: a model as a graph, and ranges of its blocks as smaller models.

    front end (onnx_graph, torch_graph)   a model file -> an abstract `CutGraph`, and back: a range
                                          of blocks -> a smaller model with only its own weights
    graph                                 the abstract graph: which tensors cross which cut
    jailed                                orders to the jail about a model, checks of answers
    signature                             inputs and outputs of a partition as they travel
    parts                                 extracted parts on disk, shared by the agents of a machine

The cuts are chosen in `catenary_agent.preparing`. Boundary `i` of a `BlockTable` consists of every
tensor computed before block `i` that block `i` or a later one needs. A part may therefore be handed
tensors it neither makes nor uses: its executor passes them through.
"""
