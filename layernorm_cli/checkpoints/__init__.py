"""Which tensors of a checkpoint are norms, and what is known of each."""
