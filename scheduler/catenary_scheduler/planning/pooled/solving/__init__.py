"""Solvers that divide the GPUs among the models: a dynamic programme, and HiGHS."""
