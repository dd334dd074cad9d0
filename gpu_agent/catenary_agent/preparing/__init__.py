"""Cutting a model into a chain of blocks, once, before it is served.

probe, onnx_probe, torch_probe   run the model once: sizes, batch dimension, times
cutting                          the choice of cuts
prepare                          all of it; writes `blocks.json` beside the model
"""
