"""Models from elsewhere: `catenaryd pull`, and what `catenary deploy` and `up --model` bring in.

source_names     "hf:org/name@v1", "s3://..", "model.onnx": what a user may write
choosing         which files of a source are the model
listing          the files of a source, with sizes and digests, before anything is fetched
hub              files of a hub, by huggingface_hub
file_systems     files of buckets and web servers, by fsspec
downloads        fetched files: aside, resumed, verified
rooms            free disk and expected time
graph_models     ONNX and torch.export files become versions of the repository
bringing         all of it: from a source to a version
steps            what is told meanwhile, to people and to the scheduler
child_importer   the scheduler's way to have it done by a child process (ADR 0040)
"""
