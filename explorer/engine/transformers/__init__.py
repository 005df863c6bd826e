"""The transformers engine, on PyTorch hooks."""
