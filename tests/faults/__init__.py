"""A cluster's real services on this machine, and what is done to them while a study runs."""
