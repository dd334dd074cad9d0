"""Text to tokens and back, by the files of a model."""
