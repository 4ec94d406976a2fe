"""Routes of trainers: pause, resume, weight updates; and versions of the weights in answers."""
