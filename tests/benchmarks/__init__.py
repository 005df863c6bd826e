"""Costs, as ratios against plain vLLM in the same run."""
