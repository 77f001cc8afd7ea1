"""A loaded model as the service uses it, wherever its engine runs."""
