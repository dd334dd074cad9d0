"""Cutting a model into a chain of blocks, once, before it is served.

    front end (onnx_graph, torch_graph)   a model file -> an abstract `CutGraph`, and back: a range
                                          of blocks -> a smaller model with only its own weights
    graph, cutting                        the one algorithm: crossing sets, and the choice of cuts
    onnx_probe, torch_probe               run the model once: sizes, batch dimension, times
    prepare                               all of it; writes `blocks.json` beside the model
    parts                                 extracted parts on disk, shared by the agents of a machine

Boundary `i` of the resulting `BlockTable` holds every tensor computed before block `i` and needed
at or behind it. A part therefore may be handed tensors it neither makes nor uses: its executor
passes them on beside the session.
"""
