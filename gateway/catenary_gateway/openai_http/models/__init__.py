"""What is told of models: the list of them, and tokens by their tokenizers."""
