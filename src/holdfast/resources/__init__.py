"""What a session holds besides its kernel. So far: the workspace."""
