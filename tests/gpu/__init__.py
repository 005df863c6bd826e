"""The engine on a GPU: what to carry to a machine without a network, the suite and the measurements to run there."""
