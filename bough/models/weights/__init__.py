"""Files of weights: their headers, and errors that name a damaged or truncated file."""
