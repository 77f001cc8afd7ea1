"""What happens in the server, as it happens: trees, requests and figures for those who watch."""
