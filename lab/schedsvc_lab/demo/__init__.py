"""The noisy neighbour, without and with the scheduler."""
