"""Images in requests: from data URLs to the inputs of the model's image tower."""
