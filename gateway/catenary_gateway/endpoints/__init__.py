"""The shared parts of all gRPC and HTTP endpoints, and the services of Catenary's own protocol."""
