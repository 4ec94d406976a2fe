"""Messages between a front and its replicas: their fields, their bytes and their sockets."""
