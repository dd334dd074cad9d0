"""Layout of virtual GPUs on physical ones, and of these on servers."""
