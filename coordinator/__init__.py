import serving_core.grpc_environment  # noqa: F401  # before gRPC
