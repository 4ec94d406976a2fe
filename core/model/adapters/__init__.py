"""LoRA adapters: their files, and their weights packed for the kernels."""
