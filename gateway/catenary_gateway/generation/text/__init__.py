"""Conversion between text and tokens with a model's tokenizer and chat template."""
