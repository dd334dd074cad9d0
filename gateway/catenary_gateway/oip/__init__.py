"""The endpoints of the Open Inference Protocol over gRPC and HTTP."""
