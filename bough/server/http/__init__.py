"""HTTP: the socket, the layers around every request, bodies, streams and errors."""
