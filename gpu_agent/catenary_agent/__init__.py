"""The agent: one process per GPU (or virtual GPU) that runs partitions of models in booked order.

devices/        what a device is called, how much it holds, what its errors mean
partitioning/   front ends of model files: a model as a graph, ranges of blocks as smaller models
preparing/      cuts a model into blocks, once, before it is served
profiling/      what each block costs on a device, measured or estimated
executors/      runs a range of blocks on a CPU, a CUDA device or an emulated one
decoders/       the same for language models, with the caches of their sessions
engine/         queue, compute thread, frames in and out
generation/     sessions that go around rings of agents
hosting/        loads and unloads partitions, as the scheduler orders
supervision/    whether steps end, and what happens if they do not

An agent decides nothing: it loads what the scheduler orders and works through its queue.
"""
