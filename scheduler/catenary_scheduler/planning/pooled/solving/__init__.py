"""Divides the GPUs among the models: by a dynamic programme, or by HiGHS."""
