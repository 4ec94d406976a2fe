"""The description of a decoder without its weights: config, tensors, rotary tables, pages."""
