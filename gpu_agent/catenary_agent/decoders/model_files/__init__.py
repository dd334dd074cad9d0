"""What the files of a language model hold: tensors, sizes, quantised weights, the graph."""
