"""Executors, which run a range of a model's blocks on a device.

    base          the `Executor` interface, and the checks that all of them share
    device        "cpu", "cuda:0", "emulated:p4"
    onnx_part     ONNX Runtime: CPU, and CUDA or TensorRT where they are installed
    onnx_writing  writes the file that `onnx_part` loads, in a process of its own
    torch_part    a part of a torch.export program: CUDA or CPU
    emulated      no weights: sleeps as long as the profile says and returns zeros
    loading       `load_executor` picks one; `measure` times it

Tensors enter and leave in the datatypes in which they travel: FP32 at an inner boundary of
`BlockTable` is FP16 if the deployment says so. Tensors that a part neither makes nor uses pass
through it.
"""
