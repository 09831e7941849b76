"""The HTTP API: ``create_app`` makes it from an AsyncLLM; what runs it is the caller's affair."""
