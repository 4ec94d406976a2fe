"""The operations of a decoder step, by torch, C or Triton."""
