"""Templates and tokenizers of models, which run in a jailed process of each model, never here.

`serving.serve` is that process: it reads the files of a model, describes them, and then answers
orders. Gateways import nothing of this package but `orders`.
"""
