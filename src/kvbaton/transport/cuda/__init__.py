"""The cuda transport: peers on the same GPU, or on GPUs of one host that reach each other."""
