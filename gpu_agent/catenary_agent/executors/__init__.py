"""Running a range of a model's blocks on a device.

    base          the `Executor` everybody codes against, and the checks all of them share
    device        "cpu", "cuda:0", "emulated:p4"
    onnx_part     ONNX Runtime: CPU, and CUDA or TensorRT where they are installed
    torch_part    a part of a torch.export program: CUDA or CPU
    emulated      no weights: sleeps as long as the profile says and returns zeros
    loading       `load_executor` picks one; `measure` times it

Tensors enter and leave as they travel: what `BlockTable` calls FP32 at an inner boundary is FP16
on the wire if the deployment says so. Tensors a part neither makes nor uses pass through it.
"""
