"""Answers about models: the list of them, and tokens by their tokenizers."""
