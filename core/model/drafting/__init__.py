"""Parts of a model that draft for it: MTP layers, assistants, and a 4-bit copy."""
