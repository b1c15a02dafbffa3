"""Studies behind pages of the documentation, each re-run by one command."""
