"""One process per GPU (or virtual GPU): hosts partitions of models and runs them in booked order.

partitioning/   cuts a model into blocks, once, before it is served
executors/      runs a range of blocks on a CPU, a CUDA device or an emulated one
engine/         queue, compute thread, frames in and out

An agent decides nothing: it loads what the scheduler orders and works its queue off.
"""
