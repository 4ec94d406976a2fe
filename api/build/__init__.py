"""The composition root: model files, drafters, pools, the engine."""
