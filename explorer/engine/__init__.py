"""Engines: what executes runs."""
