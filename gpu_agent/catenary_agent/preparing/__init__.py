"""Preparation of a model, once, before it is served: it is cut into a chain of blocks.

probe, onnx_probe, torch_probe   run the model once: sizes, batch dimension, times
cutting                          the choice of cuts
costs, onnx_costs, torch_costs   arithmetic and memory traffic of each kernel
counting                         the kernels of every block, whatever the format
prepare                          all of it; writes `blocks.json` beside the model
"""
