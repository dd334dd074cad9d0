"""Dispatch windows as a gateway uses them: decisions without I/O, with time as an argument.

window        the time that a gateway has on a pipeline's path, and what it has sent into it
window_queue  which rows go by a window, when a batch leaves, and what the scheduler is told
"""
