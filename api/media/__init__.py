"""Images of requests: from data URLs to what a model's image tower reads."""
