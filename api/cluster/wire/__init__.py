"""Messages between a front and its replicas: fields, encoding and sockets."""
