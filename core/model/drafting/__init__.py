"""Parts of a model that draft for it: MTP layers, assistants, a copy in 4 bits."""
