"""Description of a decoder without its weights: config, tensors, RoPE tables, page layout."""
