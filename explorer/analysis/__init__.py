"""Pure functions on tensors: what captured activations and logits say."""
