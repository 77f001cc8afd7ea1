"""Linear layers with one input as one product, and the kernel of each product, chosen by measuring."""
