import serving_core.net.grpc_environment  # noqa: F401  # before gRPC
