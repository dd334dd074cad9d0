"""The endpoints: what calls over gRPC and HTTP have in common, and services of our own."""
