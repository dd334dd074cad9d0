"""The paths of encoders: embeddings of texts, scores of pairs, and documents in order of a query.

encoder_calls   texts, pairs or token ids to the data plane, and its arrays back
embeddings      `/v1/embeddings`
scores          `/v1/score`: cross encoders judge a pair, others compare two embeddings
reranking       `/v1/rerank`: the scores of a query with each document
"""
