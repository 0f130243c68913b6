"""Shows the noisy neighbour, without and with the scheduler."""
