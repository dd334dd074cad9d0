"""Virtual GPUs on physical ones, and these on servers."""
