"""Several models behind one port: which there are, which are loaded, and what they need. docs/models.md."""
