"""moe: the GShard Mixture-of-Experts Transformer, written for one device and marked."""
