"""Many clients that stream from one server, against the same requests inside the process."""
