"""gRPC servers and channels, the intake of calls, and errors as gRPC and HTTP carry them."""
