"""Import of encoders: models that make numbers of texts, such as embeddings.

importing       the folder of a published model becomes a version in the repository
export_worker   its part in the jail: the graph, with pooling and normalisation at its end
"""
