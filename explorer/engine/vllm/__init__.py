"""The real engine: vLLM, with a worker of our own that captures and edits."""
